"""Asking services for their counts of requests to the object store."""

from pydantic import ValidationError

from tierlog.adapters.rpc.rest import RestService
from tierlog.model.errors import RefusedError
from tierlog.runtime.costs import Costs
from tierlog.runtime.security import SecuritySettings
from tierlog.wiring.security import calling_of


async def fetch_costs(address: str, *, timeout_s: float, security: SecuritySettings) -> Costs:
    """Return what the service at ``host:port`` counted since it began."""
    service = RestService(
        address,
        name=f"service at {address}",
        timeout_s=timeout_s,
        calling=calling_of(security),
    )
    try:
        answer = await service.call("GET", "/v1/costs")
    finally:
        await service.close()
    try:
        return Costs.model_validate_json(bytes(answer.body))
    except ValidationError as error:
        raise RefusedError(
            f"what {address} answers are no counts of requests",
            remedy="Give the HTTP address of a service of Tierlog",
        ) from error
