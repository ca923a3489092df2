"""Tables whose rows are brought to the GPU as they are used, and stepped.

table.py, file.py      records in CPU memory, pinned memory, GPU memory or a file
optim.py               states and steps of row-separable torch optimizers
cache.py, moves.py     where rows are, which are evicted and which come
link.py                how records move between CPU and GPU
lookup.py              ids to unique rows
group.py               tables of embeddings that share a memory and a cache
shard.py               rows of several ranks
store.py, embedding.py, optimizer.py    what users call
ops.py, launch.py, cu/ kernels, and how they are launched
"""
