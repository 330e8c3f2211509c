"""Fits runs into memory: repeats updates that ran out of memory in smaller parts, and resolves DATA.BATCH_SIZE auto."""
