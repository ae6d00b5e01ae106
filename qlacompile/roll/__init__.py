"""Loops as data: rolled while Dynamo traces them (:mod:`.dynamo`), or found again in an unrolled graph
(:mod:`.graph`)."""
