"""The style sheet of all pages. Colors have a contrast of at least 4.5 to 1 on their background, in both themes."""

from __future__ import annotations

LIGHT = {
    "ground": "#f5f6f8",
    "card": "#ffffff",
    "ink": "#1b2330",
    "dim": "#59636f",
    "line": "#dfe3e8",
    "link": "#1a4fc4",
    "good": "#137a3c",
    "warn": "#8f5300",
    "bad": "#b3261e",
    "spot": "#2f6fed",
    "demand": "#d3640b",
    "static": "#7a5bc0",
    "save": "#0d8a8a",
    "notice": "#e0a100",
}
DARK = {
    "ground": "#10141b",
    "card": "#181e27",
    "ink": "#e6e9ee",
    "dim": "#a0abb9",
    "line": "#2b333f",
    "link": "#8ab4f8",
    "good": "#5fd38a",
    "warn": "#f2bd5a",
    "bad": "#ff8a80",
    "spot": "#5b9bff",
    "demand": "#ff9d5c",
    "static": "#b59cf0",
    "save": "#3cc7c7",
    "notice": "#ffd24d",
}


def _variables(colors: dict[str, str]) -> str:
    return "".join(f"--{name}:{color};" for name, color in colors.items())


RULES = """
body{background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
  margin:0}
.sk a{color:var(--link);text-decoration:none}
.sk a:hover,.sk a.inline{text-decoration:underline}
.sk :focus-visible{outline:2px solid var(--link);outline-offset:2px;border-radius:3px}
.sk h1{font-size:1.5rem;line-height:1.3;font-weight:650;margin:0}
.sk h2{font-size:1.05rem;line-height:1.4;font-weight:650;margin:0 0 .6rem}
.sk h2:not(:first-child){margin-top:1.2rem}
.sk p{margin:.2rem 0}
.wide{box-sizing:border-box;width:100%;max-width:1500px;margin:0 auto;padding:16px}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px;margin-bottom:16px;
  min-width:0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:0 16px}
.dim{color:var(--dim)} .small{font-size:.82rem} .good{color:var(--good)} .warn{color:var(--warn)} .bad{color:var(--bad)}
.num,.right{font-variant-numeric:tabular-nums}
.right{text-align:right!important}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(118px,1fr));gap:12px 16px}
.figure{font-size:1.15rem;font-weight:600;font-variant-numeric:tabular-nums}
.badge{display:inline-block;padding:0 .55em;border-radius:1em;font-size:.82rem;font-weight:600;border:1px solid
  currentColor;white-space:nowrap}
.badge.spot{color:var(--link)} .badge.on-demand{color:var(--warn)} .badge.static,.badge.reserved{color:
  var(--static-ink)}
.badge.plain{color:var(--dim)}
table.rows{border-collapse:collapse;width:100%}
table.rows th{font-size:.8rem;font-weight:600;color:var(--dim);text-align:left;padding:6px 10px;border-bottom:1px solid
  var(--line);white-space:nowrap}
table.rows td{padding:8px 10px;border-bottom:1px solid var(--line);text-align:left;vertical-align:top;
  overflow-wrap:break-word}
table.rows tbody tr:last-child td{border-bottom:0}
table.rows tbody tr:hover{background:color-mix(in srgb,var(--line) 30%,transparent)}
.nobreak{white-space:nowrap} table.rows td.lead{min-width:7.5em}
.unseen{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
.bar{height:6px;border-radius:3px;background:var(--line);overflow:hidden;min-width:90px}
.bar>div{height:100%;background:var(--spot)}
.bar.done>div{background:var(--good)}
.spark{display:block;width:110px;height:26px}
.spark polyline{fill:none;stroke:var(--spot);stroke-width:1.5;vector-effect:non-scaling-stroke}
.note{border-left:3px solid var(--warn);padding:6px 12px;margin:0 0 12px;background:color-mix(in srgb,var(--notice)
  12%,transparent);border-radius:0 6px 6px 0;overflow-wrap:anywhere}
.note.bad{border-color:var(--bad);color:var(--ink);background:color-mix(in srgb,var(--bad) 10%,transparent)}
.keys{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:.82rem;color:var(--dim);margin:0 0 8px}
.keys i{display:inline-block;width:18px;height:10px;border-radius:2px;margin-right:6px;vertical-align:baseline}
pre.log{font:12.5px/1.5 ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;white-space:pre-wrap;
  overflow-wrap:anywhere;margin:0;max-height:60vh;overflow:auto;padding:12px;border-radius:8px;background:var(--ground);
  border:1px solid var(--line);color:var(--ink)}
mark{background:var(--notice);color:#1b2330;border-radius:2px}
.hatch{background-image:repeating-linear-gradient(45deg,transparent 0 3px,var(--card) 3px 6px)}
@media (max-width:760px){
  .wide{padding:10px}
  table.rows thead{position:absolute;clip-path:inset(50%);width:1px;height:1px;overflow:hidden}
  table.rows,table.rows tbody,table.rows td{display:block;width:auto}
  table.rows tr{display:grid;grid-template-columns:repeat(auto-fill,minmax(92px,1fr));gap:6px 12px;
    grid-auto-flow:dense;border-bottom:1px solid var(--line);padding:10px 0}
  table.rows tbody tr:last-child{border-bottom:0}
  table.rows td{border:0;padding:0;font-size:.9rem;text-align:left!important;overflow-wrap:anywhere}
  table.rows td::before{content:attr(data-label);color:var(--dim);font-size:.75rem;line-height:1.3;display:block}
  table.rows td.lead,table.rows td.long{grid-column:1/-1} table.rows td.lead>div{display:flex;flex-wrap:wrap;gap:0 10px;
    align-items:baseline}
  table.rows td.lead::before,table.log td::before{content:none!important}
  table.rows .nobreak{white-space:normal}
  table.rows td.none{display:none} table.rows .spark{max-width:100%}
  table.log tr{grid-template-columns:auto 1fr;gap:0 12px;padding:6px 0}
  table.log td:not(.long){font-size:.8rem;color:var(--dim)}
  .facts{grid-template-columns:repeat(2,minmax(0,1fr))}
}
@media print{.card{break-inside:avoid}}
"""

_LIGHT, _DARK = (_variables({**LIGHT, "static-ink": "#6346ad"}), _variables({**DARK, "static-ink": DARK["static"]}))
FILE_STYLE = f":root{{color-scheme:light dark;{_LIGHT}}}@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}{RULES}"
# Quasar says on the body which theme is on.
PAGE_STYLE = f":root,body.body--light{{{_LIGHT}}}body.body--dark{{{_DARK}}}{RULES}"
