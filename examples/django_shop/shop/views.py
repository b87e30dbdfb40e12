"""The shop's two requests.

Invariants:
- A request is one transaction.
- A repeated request with the same Idempotency-Key changes nothing and returns the same event's id.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from uuid import uuid4

from django.core.exceptions import PermissionDenied
from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest, JsonResponse
from django.shortcuts import get_object_or_404
from django.urls import path
from django.views.decorators.http import require_POST

from outbox_pipelines.writer import NewEvent, correlated, emit, emit_many
from shop.models import Order


def correlate(get_response: Callable[[HttpRequest], HttpResponse]) -> Callable[[HttpRequest], HttpResponse]:
    """Return a middleware that gives all events of a request its id."""

    def middleware(request: HttpRequest) -> HttpResponse:
        request_id = request.headers.get("X-Request-Id") or str(uuid4())
        with correlated(correlation_id=request_id):
            response = get_response(request)
        response["X-Request-Id"] = request_id
        return response

    return middleware


@require_POST
@transaction.atomic
def place(request: HttpRequest) -> HttpResponse:
    if not request.headers.get("Idempotency-Key"):
        return HttpResponseBadRequest("give an Idempotency-Key")
    key = f"django {request.headers['Idempotency-Key']}"
    order = Order.objects.create(total=json.loads(request.body)["total"])
    event = emit(connection, "order", order.pk, "order.placed", {"total": order.total}, idempotency_key=key)
    if event.duplicate:
        # The order of the first request is there.
        transaction.set_rollback(True)
    elif order.total > 1000:
        raise PermissionDenied("the payment is refused")
    answer = {"event": event.id, "duplicate": event.duplicate}
    return JsonResponse(answer, status=200 if event.duplicate else 201)


@require_POST
@transaction.atomic
def ship(request: HttpRequest, order_id: int) -> HttpResponse:
    order = get_object_or_404(Order.objects.select_for_update(), pk=order_id)
    order.state = "shipped"
    order.save()
    emit_many(
        connection,
        [
            NewEvent("order", order.pk, "order.parcel_shipped", {"parcel": parcel})
            for parcel in json.loads(request.body)
        ],
    )
    return HttpResponse(status=204)


urlpatterns = [path("orders", place), path("orders/<int:order_id>/parcels", ship)]
