"""Checkpoints, from the bytes of a file to the run that goes on from them.

`tensorfile` and `snapshot` are the files on disk; `part` and `worker` say what a part and a worker
have in them. `schedule` decides when one is due. `shard` writes a shard's file; `saver` takes care
of a worker's, with `worker`'s writer. Shards gather what was written (`records`), the first worker
makes it complete (`completion`), as long as the folder is its run's (`owner`). `resume` chooses the
one to go on from, `export` makes a model's file of it.

Nothing here imports the server, a worker or torch: those describe themselves in NumPy arrays and
plain data.
"""
