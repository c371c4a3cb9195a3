"""The sweep: every architecture to every format, each artifact checked against the original.

``make sweep`` runs it. ``catalogue`` lists the architectures: models of ``transformers`` and
modules written for it, all tiny, with random weights. Each is exported by ``modelport export``, and
what is published is compared with the original by code that shares nothing with modelport's proof.
"""
