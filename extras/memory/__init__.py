"""What fits into memory: updates that ran out of it are repeated in smaller parts, and DATA.BATCH_SIZE auto."""
