"""A program: a Ray cluster of two nodes, of which one can be killed.

It prints the cluster's address, and ends when its input ends. It obeys lines: "kill"
kills the second node as a loss of power would, "add" starts another, and either is
answered by a line.
"""

import sys

from ray._common.utils import reset_ray_address
from ray.cluster_utils import Cluster

NODE = {"num_cpus": 2, "include_dashboard": False}


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


cluster = Cluster(initialize_head=True, head_node_args=NODE)
# Otherwise every program of this machine that calls ray.init() would join it.
reset_ray_address()
second = cluster.add_node(**NODE)
say(cluster.address)
for line in sys.stdin:
    if line.strip() == "kill":
        cluster.remove_node(second, allow_graceful=False)
    else:
        second = cluster.add_node(**NODE)
    say("done")
cluster.shutdown()
