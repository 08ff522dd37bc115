import json

from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

import penstock
from shop import queues


@csrf_exempt  # called by programs, not by forms
@require_POST
def place_order(request: HttpRequest) -> JsonResponse:
    order = json.loads(request.body)
    request_id = request.headers.get("Idempotency-Key")
    try:
        item_id = queues.orders().produce(order, key=order["customer"], request_id=request_id, timeout=5)
    except penstock.errors.PenstockError as error:
        return JsonResponse({"error": error.code, "message": str(error)}, status=error.http_status)
    return JsonResponse({"id": item_id}, status=202)
