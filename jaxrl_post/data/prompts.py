"""The order in which tasks are drawn, as a grain iterator that checkpoints."""

import grain

__all__ = ["task_indices"]


def task_indices(num_tasks: int, seed: int) -> grain.DatasetIterator:
    """Iterates over task indices for ever, each epoch in an order of its own.

    The iterator's position is part of a checkpoint: a resumed run draws what the run
    that was never stopped would have drawn.

    Args:
        num_tasks: at least 1.
        seed: of the order.

    >>> indices = task_indices(3, seed=0)
    >>> sorted(next(indices) for _ in range(3))
    [0, 1, 2]
    """
    if num_tasks < 1:
        raise ValueError(f"task_indices: the data set is empty; got {num_tasks} tasks")
    dataset = grain.MapDataset.range(num_tasks).seed(seed).shuffle().repeat()
    # No prefetching threads: drawing an integer takes no time.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(dataset.to_iter_dataset(options))
