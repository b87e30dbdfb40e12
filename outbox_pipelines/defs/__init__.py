"""What Dagster sees. Thin: everything that does the work lives in the packages beside this one.

Invariants:
- Every module is loaded by itself (see `definitions.py`); importing one loads no driver, client or pandas.
- Every asset, job and sensor says what it does, when to use it, and what to do when it fails.
"""
