"""The minimal Django settings; the outbox needs one line."""

from __future__ import annotations

import os

from psycopg.conninfo import conninfo_to_dict

_DATABASE = conninfo_to_dict(os.environ["OUTBOX_DSN"])

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _DATABASE.get("dbname"),
        "USER": _DATABASE.get("user"),
        "PASSWORD": _DATABASE.get("password"),
        "HOST": _DATABASE.get("host"),
        "PORT": _DATABASE.get("port"),
        # Where the password is, if the DSN names a file of libpq instead.
        "OPTIONS": {name: value for name, value in _DATABASE.items() if name in ("passfile", "sslmode")},
    }
}
INSTALLED_APPS = [
    "outbox_pipelines.django",  # its migration creates the outbox
    "shop",
]
MIDDLEWARE = ["shop.views.correlate"]
ROOT_URLCONF = "shop.views"
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
SECRET_KEY = "only for this example"
USE_TZ = True
