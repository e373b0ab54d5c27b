"""This runs in an environment with torch, not in this one."""

collect_ignore = ["theirs.py"]
