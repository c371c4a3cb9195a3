"""Optimised and quantised ONNX graphs, by the tools of ONNX Runtime.

``onnx_graph`` rewrites a converted file, ``speedup`` measures the result beside it. The proof that
follows is the same as for any other artifact.
"""
