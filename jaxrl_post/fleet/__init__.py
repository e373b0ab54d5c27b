"""Samplers in other processes: the trainer's hub, weights over HTTP, leases."""
