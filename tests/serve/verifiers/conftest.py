"""What a Python that has verifiers runs is no test of ours."""

collect_ignore = ["theirs.py"]
