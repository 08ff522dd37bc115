"""The HTTP server of a broker: `penstock serve`.

A handler decodes a request, awaits the home, and encodes the answer; it holds no rule of the queue. Every operation of
every request goes through `ServedRequest.call`, which checks the access of the request's key.
"""
