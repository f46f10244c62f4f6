"""Stands in for the ``nixl`` package in vLLM's processes; the parts are those of ``nixl_cu12``.

vLLM has no setting for NIXL's progress thread, which spins: put this folder on ``PYTHONPATH``.
"""
