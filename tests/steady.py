"""The metrics that two equal runs share."""

# Beginnings of the names of metrics that depend on the machine and its load.
UNSTEADY = ("time/", "throughput/", "host/", "watch/")
