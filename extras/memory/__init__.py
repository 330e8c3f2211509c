"""Makes runs fit into memory: repeats updates that ran out of it in smaller parts, and finds DATA.BATCH_SIZE auto."""
