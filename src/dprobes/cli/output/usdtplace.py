"""USDT probes of a module, as ``list``, ``locate`` and ``show`` print them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dprobes.errors import TargetError
from dprobes.escapes import escaped
from dprobes.target.usdt import matching_sites, near_probes, usdt_sites

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dprobes.target.location import Module
    from dprobes.target.usdt import UsdtSite

__all__ = ["PREFIX", "USDT_HEADER", "describe_usdt", "described_site", "guard_of", "split_usdt", "usdt_rows"]

PREFIX = "usdt"
USDT_HEADER = ("usdt probe", "sites", "arguments", "guarded by a semaphore")


def split_usdt(place: str) -> tuple[str, str, str] | None:
    """Return module, provider and name (patterns, or ``*``) of ``MODULE:usdt[:PROVIDER[:NAME]]``; None for others."""
    module, colon, rest = place.partition(f":{PREFIX}")
    if not colon or (rest and not rest.startswith(":")) or rest.startswith("::"):
        return None
    provider, _, name = rest.removeprefix(":").partition(":")
    return module, provider or "*", name or "*"


def usdt_rows(module: Module, provider: str = "*", name: str = "*") -> list[tuple[str, ...]]:
    """Return the USDT probes of a module that match the patterns, each with its arguments."""
    by_probe: dict[str, list[UsdtSite]] = {}
    for site in matching_sites(module.elf, provider, name):
        by_probe.setdefault(site.probe, []).append(site)
    return [
        (
            f"{PREFIX}:{escaped(probe)}",
            str(len(sites)),
            _types(sites),
            "yes" if any(site.semaphore for site in sites) else "no",
        )
        for probe, sites in sorted(by_probe.items())
    ]


def _types(sites: Sequence[UsdtSite]) -> str:
    """Return the types of arguments, of each form that sites have."""
    forms = dict.fromkeys(", ".join(argument.type_name for argument in site.arguments) or "none" for site in sites)
    return " or ".join(forms)


def describe_usdt(module: Module, provider: str, name: str) -> Iterator[str]:
    """Iterate over lines with the sites of USDT probes; raise ``TargetError`` if there are none."""
    sites = matching_sites(module.elf, provider, name)
    if not sites:
        if not usdt_sites(module.elf):
            raise TargetError(f"'{module.path}' has no USDT probes")
        near = near_probes(module.elf, provider, name)
        hint = f"did you mean '{PREFIX}:{near[0]}'?" if near else None
        raise TargetError(f"'{module.path}' has no USDT probe '{PREFIX}:{provider}:{name}'", hint=hint)
    last = ""
    for site in sorted(sites, key=lambda site: (site.probe, site.address)):
        if site.probe != last:
            last = site.probe
            yield ""
            yield f"offset = {PREFIX}:{escaped(site.probe)}"
        yield from (f"    {line}" for line in _site_lines(module, site))


def _site_lines(module: Module, site: UsdtSite) -> Iterator[str]:
    if site.offset is None:
        yield f"at address {site.address:#x}, which is not in the code of the file"
        return
    symbol = module.symbol_at(site.offset)
    where = f" in {symbol[0]}+{symbol[1]:#x}" if symbol is not None else ""
    yield f"at file offset {site.offset:#x}{where}"
    yield from (f"    {line}" for line in described_site(site))


def described_site(site: UsdtSite) -> Iterator[str]:
    """Iterate over lines with the arguments of a site, and whether a semaphore guards it."""
    for number, argument in enumerate(site.arguments, 1):
        obstacle = f": cannot be pushed, {argument.obstacle}" if argument.obstacle else ""
        yield f"push usdt, {number:<3} {argument.type_name:<4} {escaped(argument.text.rpartition('@')[2])}{obstacle}"
    if site.semaphore:
        yield "guarded by a semaphore, which is raised as long as the probe is there"


def guard_of(module: Module, offset: int) -> str | None:
    """Return what is to be said of a file offset if a semaphore decides whether the program comes by."""
    for site in usdt_sites(module.elf):
        if site.offset == offset:
            probe = f"{PREFIX}:{escaped(site.probe)}"
            if site.semaphore:
                return (
                    f"This is a place of '{probe}', which is guarded by a semaphore: a probe with a number is hit only "
                    f"while somebody raises it, as 'offset = {probe}' does."
                )
            return f"This is a place of '{probe}': 'offset = {probe}' knows its arguments."
    return None
