"""Workers: handlers run on what a queue holds. `Worker` and the decorator are in worker.py; running.py shows how the rest fits together."""
