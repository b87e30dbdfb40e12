"""`python -m outbox_pipelines` is the command `outbox`."""

from outbox_pipelines.cli import main

if __name__ == "__main__":
    main()
