"""The tests: see CONTRIBUTING.md."""

from importlib.util import find_spec

if find_spec("psycopg") is None:
    raise ImportError(
        "the tests need the packages of .venv: run `make lint` once, then `.venv/bin/python -m pytest …`"
    )
