"""Tables whose rows are brought to the GPU as they are used, and stepped.

table.py, file.py      records in CPU memory, pinned memory, GPU memory or a file
optim.py               states and steps of row-separable torch optimizers
cache.py, moves.py     where rows are, which are evicted and which come
link.py                how records move between CPU and GPU
lookup.py              ids to unique rows: of all tables (LookUp), of one (RowPage)
group.py               tables of embeddings that share a memory and a cache
paged_table.py         first weights, gradients and optimizer state of an embedding
weight.py              its weight as a parameter, and views of that
shard.py               rows of several ranks
checkpoint.py          tables on disk
store.py, embedding.py, optimizer.py    what users call
ops.py, launch.py, cu/ kernels, and how they are launched
"""
