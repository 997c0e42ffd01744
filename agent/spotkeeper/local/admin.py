"""``/local/v1``: what only a stand-in has. Take a machine away, empty a zone, look at everything, read the bill."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spotkeeper.local import errors
from spotkeeper.local.bill import Bill
from spotkeeper.local.cloudparts import Parts
from spotkeeper.local.errors import ApiError
from spotkeeper.local.paths import last
from spotkeeper.local.views import (
    BillView,
    DiskView,
    Maintenance,
    Preempt,
    SetCapacity,
    SetPartition,
    SetQuota,
    Status,
    VmView,
    ZoneView,
)
from spotkeeper.local.vm import Quota, Vm
from spotkeeper.spec import codec

log = logging.getLogger("spotkeeper.local")
T = TypeVar("T", bound=Struct)
STANDARD_NOTICE_S = 60.0
_EVENTS = ("NONE", "TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE")


class Empty(Struct, frozen=True):
    ok: bool = True


class Admin:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._world = parts.world

    def routes(self) -> list[Route]:
        post = self._post
        return [
            Route("/local/v1/health", self._get(Empty)),
            Route("/local/v1/status", self._get(self.status)),
            Route("/local/v1/bill", self._get(lambda: BillView(self.bill(), tuple(self._parts.billing.lines())))),
            Route("/local/v1/jwks", self.jwks),
            Route("/local/v1/vms/{name}/preempt", post(Preempt, self._preempt), methods=["POST"]),
            Route("/local/v1/vms/{name}/maintenance", post(Maintenance, self._maintenance), methods=["POST"]),
            Route("/local/v1/capacity", post(SetCapacity, self._capacity), methods=["POST"]),
            Route("/local/v1/partition", post(SetPartition, self._partition), methods=["POST"]),
            Route("/local/v1/quota", post(SetQuota, self._quota), methods=["POST"]),
        ]

    def _get(self, view: Callable[[], Struct]) -> Callable[[Request], object]:
        async def handle(_: Request) -> Response:  # async: a plain function would run in a thread, beside the loop
            return _json(view())

        return handle

    async def jwks(self, _: Request) -> Response:
        body = msgspec.json.encode(self._parts.tokens.jwks())
        return Response(body, media_type="application/json", headers={"Cache-Control": "public, max-age=3600"})

    def _post(self, kind: type[T], act: Callable[[str, T], None]) -> Callable[[Request], object]:
        async def handle(request: Request) -> Response:
            try:
                body = codec.decode(await request.body() or b"{}", kind)
                with self._world.state.transaction():
                    act(request.path_params.get("name", ""), body)
            except msgspec.DecodeError as error:
                return refused(ApiError(400, "badRequest", str(error)))
            except ApiError as error:
                return refused(error)
            return _json(Empty())

        return handle

    def _vm(self, name: str) -> Vm:
        vm = self._parts.machines.find_by_name(name)
        if vm is None:
            names = ", ".join(other.name for other in self._parts.machines.list()) or "none"
            raise ApiError(404, "notFound", f"VM {name!r}: no such VM (there is: {names})")
        return vm

    def _zone(self, zone: str) -> str:
        if zone not in self._world.config.zones:
            known = ", ".join(self._world.config.zones)
            raise ApiError(404, "notFound", f"zone {zone!r}: no such zone (there is: {known})")
        return zone

    def _preempt(self, name: str, body: Preempt) -> None:
        """Spot: preempted. Standard: only without notice, as a broken host."""
        vm = self._vm(name)
        log.info("operator takes %s, notice=%s", vm.name, body.notice)
        if vm.spot:
            self._parts.power.preempt(vm, notice=body.notice)
        elif vm.wire.status != "RUNNING":
            raise errors.not_ready(vm.path)
        elif body.notice:
            # A standard VM has no preemption; its host's maintenance is the notice it gets, then the host goes.
            ends = self._world.now() + STANDARD_NOTICE_S
            self._parts.instances.set_maintenance(vm, "TERMINATE_ON_HOST_MAINTENANCE", ends)
            self._world.soon(STANDARD_NOTICE_S, "vm.host", vm.path)
        else:
            self._parts.power.lose(vm)

    def _maintenance(self, name: str, body: Maintenance) -> None:
        if body.event not in _EVENTS:
            raise errors.invalid("event", body.event, f"Must be one of {', '.join(_EVENTS)}.")
        at = 0.0 if body.in_s is None else self._world.now() + body.in_s
        self._parts.instances.set_maintenance(self._vm(name), body.event, at)

    def _capacity(self, _: str, body: SetCapacity) -> None:
        if body.model not in ("spot", "on-demand"):
            raise errors.invalid("model", body.model, "Must be spot or on-demand.")
        if body.nodes is not None and body.nodes < 0:
            raise errors.invalid("nodes", body.nodes, "Must be 0 or more, or null for the market's.")
        self._parts.spot.set_capacity(
            self._zone(body.zone), body.nodes, spot=body.model == "spot", reclaim=body.reclaim
        )

    def _partition(self, _: str, body: SetPartition) -> None:
        self._parts.spot.set_partition(self._zone(body.zone), body.partitioned)

    def _quota(self, _: str, body: SetQuota) -> None:
        self._world.state.put("quotas", self._zone(body.zone), Quota(body.instances))

    def bill(self) -> Bill:
        return self._parts.billing.bill()

    def status(self) -> Status:
        parts = self._parts
        return Status(
            now=self._world.now(),
            scale=self._world.clock.scale,
            endpoint=self._world.config.endpoint,
            vms=tuple(self._vm_view(vm) for vm in parts.machines.list()),
            disks=tuple(
                DiskView(
                    disk.name,
                    last(disk.zone),
                    disk.size_gb,
                    disk.status,
                    tuple(last(user) for user in disk.users or ()),
                    disk.labels or {},
                )
                for disk in parts.disks.list("projects/")
            ),
            zones=tuple(self._zone_view(zone) for zone in self._world.config.zones),
            functions=tuple(parts.functions.views()),
            bill=self.bill(),
            resources=parts.resources.names(),
        )

    def _vm_view(self, vm: Vm) -> VmView:
        return VmView(
            name=vm.name,
            id=str(vm.id),
            zone=vm.zone,
            model="spot" if vm.spot else "on-demand",
            machine=vm.machine,
            status=vm.wire.status,
            address=vm.address,
            labels=vm.wire.labels or {},
            created=vm.wire.creation_timestamp or "",
            price=self._parts.billing.price(vm.machine, vm.zone, vm.spot),
            preempted=vm.preempted,
            notice_until=vm.notice_until,
            pid=vm.pid,
            root=str(self._parts.host.root(vm.id)),
            serial=str(self._parts.host.serial(vm.name, vm.id)),
        )

    def _zone_view(self, zone: str) -> ZoneView:
        spot = self._parts.spot
        override = spot.override(zone)
        return ZoneView(
            zone=zone,
            capacity=spot.limit(zone, spot=True),
            running=len(spot.running(zone, spot=True)),
            on_demand_running=len(spot.running(zone, spot=False)),
            overridden=override.spot is not None,
            partitioned=override.partitioned,
            spot_price_share=self._world.market.price(zone, self._world.now()),
        )


def _json(value: Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def refused(error: ApiError) -> Response:
    return Response(msgspec.json.encode(error.body()), error.code, media_type="application/json")
