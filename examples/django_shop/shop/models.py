"""The shop's one table."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    id = models.BigAutoField(primary_key=True)
    total = models.IntegerField()
    state = models.TextField(default="placed")
