"""Workers: they lease items of queues and run handlers on them. `Worker` is in worker.py; run.py shows how the parts fit together."""
