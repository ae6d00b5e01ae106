"""What the backend did and why not more: the Report, and how it is collected and shown.

``qlacompile.explain`` is the function in ``run.py``; its neighbours are reached as
``from qlacompile.explain.x import y``.
"""
