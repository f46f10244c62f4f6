"""Stands in for the ``nixl`` package in vLLM's processes; the parts are those of ``nixl_cu12``.

NIXL's progress thread spins, and vLLM has no setting for it. Without that thread vLLM's reads hang,
since an idle prefill engine makes no progress either. With this folder on ``PYTHONPATH`` the thread
pauses between its rounds, as it can: only NIXL's Python API fixes the pause at zero.
"""
