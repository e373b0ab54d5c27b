"""A program: a Ray cluster of two nodes; one of them can be killed.

It prints the cluster's address, and ends when its input ends. It obeys lines: "kill"
kills the second node as a loss of power would, "add" starts another, and either is
answered by a line.
"""

import sys

NODE = {"num_cpus": 2, "include_dashboard": False}


def main() -> None:
    """Runs the cluster; a test only imports this module, to look for doctests."""
    # Here, so that a test run without the extra `ray` can import this module.
    from ray._common.utils import reset_ray_address
    from ray.cluster_utils import Cluster

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


def say(line: str) -> None:
    """Writes a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
