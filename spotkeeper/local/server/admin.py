"""``/local/v1``, the interface that only this cloud has: preempt machines, set capacity, show status and the bill."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spotkeeper.contract import codec
from spotkeeper.local.core import errors, views
from spotkeeper.local.core.errors import ApiError
from spotkeeper.local.core.rest import json_answer, last, refused
from spotkeeper.local.core.vm import LocalVm, Quota
from spotkeeper.local.server.wiring import CloudParts

log = logging.getLogger("spotkeeper.local")
T = TypeVar("T", bound=Struct)
STANDARD_NOTICE_S = 60.0
_EVENTS = ("NONE", "TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE")


class Ok(Struct, frozen=True):
    ok: bool = True


class Admin:
    def __init__(self, parts: CloudParts) -> None:
        self._parts = parts
        self._world = parts.world

    def routes(self) -> list[Route]:
        post = self._post
        return [
            Route("/local/v1/health", self._get(Ok)),
            Route("/local/v1/status", self._get(self.status)),
            Route("/local/v1/bill", self._get(self.bill)),
            Route("/local/v1/jwks", self.jwks),
            Route("/local/v1/vms/{name}/preempt", post(views.Preempt, self._preempt), methods=["POST"]),
            Route("/local/v1/vms/{name}/maintenance", post(views.Maintenance, self._maintenance), methods=["POST"]),
            Route("/local/v1/capacity", post(views.SetCapacity, self._capacity), methods=["POST"]),
            Route("/local/v1/partition", post(views.SetPartition, self._partition), methods=["POST"]),
            Route("/local/v1/quota", post(views.SetQuota, self._quota), methods=["POST"]),
        ]

    def _get(self, view: Callable[[], Struct]) -> Callable[[Request], object]:
        async def handle(_: Request) -> Response:  # async, because starlette runs a plain function in a thread
            return json_answer(view())

        return handle

    async def jwks(self, _: Request) -> Response:
        answer = json_answer(self._parts.tokens.jwks())
        answer.headers["Cache-Control"] = "public, max-age=3600"
        return answer

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
            return json_answer(Ok())

        return handle

    def _vm(self, name: str) -> LocalVm:
        vm = self._parts.machines.find_by_name(name)
        if vm is None:
            names = ", ".join(other.name for other in self._parts.machines.list()) or "none"
            raise ApiError(404, "notFound", f"no such VM: {name!r} (known: {names})")
        return vm

    def _zone(self, zone: str) -> str:
        if zone not in self._world.config.zones:
            known = ", ".join(self._world.config.zones)
            raise ApiError(404, "notFound", f"no such zone: {zone!r} (known: {known})")
        return zone

    def _preempt(self, name: str, body: views.Preempt) -> None:
        """Preempt a spot VM, or make a standard VM's host fail. ``body.notice``: announce it first."""
        vm = self._vm(name)
        log.info("operator preempts %s, notice=%s", vm.name, body.notice)
        if vm.spot:
            self._parts.power.preempt(vm, notice=body.notice)
        elif vm.wire.status != "RUNNING":
            raise errors.not_ready(vm.path)
        elif body.notice:
            ends = self._world.now() + STANDARD_NOTICE_S
            self._parts.instances.set_maintenance(vm, "TERMINATE_ON_HOST_MAINTENANCE", ends)
            self._world.soon(STANDARD_NOTICE_S, "vm.host", vm.path)
        else:
            self._parts.power.lose(vm)

    def _maintenance(self, name: str, body: views.Maintenance) -> None:
        if body.event not in _EVENTS:
            raise errors.invalid("event", body.event, f"Must be one of {', '.join(_EVENTS)}.")
        at = 0.0 if body.in_s is None else self._world.now() + body.in_s
        self._parts.instances.set_maintenance(self._vm(name), body.event, at)

    def _capacity(self, _: str, body: views.SetCapacity) -> None:
        if body.model not in ("spot", "on-demand"):
            raise errors.invalid("model", body.model, "Must be spot or on-demand.")
        if body.nodes is not None and body.nodes < 0:
            raise errors.invalid("nodes", body.nodes, "Must be 0 or more, or null for the market's capacity.")
        self._parts.spot.set_capacity(
            self._zone(body.zone), body.nodes, spot=body.model == "spot", reclaim=body.reclaim
        )

    def _partition(self, _: str, body: views.SetPartition) -> None:
        self._parts.spot.set_partition(self._zone(body.zone), body.partitioned)

    def _quota(self, _: str, body: views.SetQuota) -> None:
        self._world.state.put("quotas", self._zone(body.zone), Quota(body.instances))

    def bill(self) -> views.BillView:
        return views.BillView(self._parts.billing.bill(), tuple(self._parts.billing.lines()))

    def status(self) -> views.Status:
        parts = self._parts
        return views.Status(
            now=self._world.now(),
            scale=self._world.clock.scale,
            endpoint=self._world.config.endpoint,
            vms=tuple(self._vm_view(vm) for vm in parts.machines.list()),
            disks=tuple(
                views.DiskView(
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
            bill=parts.billing.bill(),
            resources=parts.resources.names(),
            reservations=tuple(parts.reservations.views()),
        )

    def _vm_view(self, vm: LocalVm) -> views.VmView:
        return views.VmView(
            name=vm.name,
            id=str(vm.id),
            zone=vm.zone,
            model="spot" if vm.spot else "on-demand" if vm.reservation is None else "reserved",
            machine=vm.machine,
            status=vm.wire.status,
            address=vm.address,
            labels=vm.wire.labels or {},
            created=vm.wire.creation_timestamp or "",
            price=self._parts.billing.price(vm.machine, vm.zone, vm.spot) if vm.reservation is None else 0.0,
            preempted=vm.preempted,
            notice_until=vm.notice_until,
            pid=vm.pid,
            root=str(self._parts.host.root(vm.id)),
            serial=str(self._parts.host.serial(vm.name, vm.id)),
        )

    def _zone_view(self, zone: str) -> views.ZoneView:
        spot = self._parts.spot
        override = spot.override(zone)
        return views.ZoneView(
            zone=zone,
            capacity=spot.limit(zone, spot=True),
            running=len(spot.running(zone, spot=True)),
            on_demand_running=len(spot.running(zone, spot=False)),
            overridden=override.spot is not None,
            partitioned=override.partitioned,
            spot_price_share=self._world.market.price(zone, self._world.now()),
        )
