"""The program of a worker process, which runs one instance of a model.

It needs numpy, ``triton_python_backend_utils`` and what ``@modelport.model`` needs: its interpreter
may be that of another environment, in which modelport is not installed. So its modules import each
other relatively.
"""
