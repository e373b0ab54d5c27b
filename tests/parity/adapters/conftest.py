"""This runs in an environment with torch and peft, not in this one."""

collect_ignore = ["theirs.py"]
