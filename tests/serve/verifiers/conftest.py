"""Files that run under verifiers' own Python are not collected here."""

collect_ignore = ["theirs.py"]
