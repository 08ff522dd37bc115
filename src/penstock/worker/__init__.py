"""Workers lease items from queues and run handlers on them. `Worker` is in worker.py; run.py connects its parts."""
