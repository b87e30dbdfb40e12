"""`python -m outbox_pipelines.lint`: `outbox lint-writes` alone, which needs nothing but click."""

from outbox_pipelines.lint.commands import lint_writes

if __name__ == "__main__":
    lint_writes(prog_name="outbox lint-writes")
