"""Fits runs into memory: repeats an update in smaller parts if memory runs out, and resolves DATA.BATCH_SIZE auto."""
