"""Answers written from an outline, whose points are rows of one batch. Approximate by design.

The target first writes the outline of its answer, a numbered list of short points; then all points
are expanded at once, each as a row of its own that does not see what the others write; the answer
is their texts in order. `skeleton` is skeleton-of-thought (arXiv 2307.15337); with `skeleton-graph`
(arXiv 2402.12280) the outline also says which points each point builds on, and a point is expanded
when those are written, which it then reads. An answer without an outline is the plain one.

`parse.py` reads outlines, `answer.py` plans the requests of one answer, `in_order.py` puts the
texts in order, `writer.py` has an engine carry them out; the server does so by its own.
"""
