"""A shop with Django.

outbox local run -- sh -c 'cd examples/django_shop && python manage.py migrate && python manage.py runserver'
"""

from __future__ import annotations

import os
import sys

from django.core.management import execute_from_command_line

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
    execute_from_command_line(sys.argv)
