"""The page around a report: its skeleton, its style, and text made safe for it."""

from html import escape
from string import Template

__all__ = ["page", "text"]

# What a browser would swallow or act on: control characters become their pictures.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_VISIBLE[0x7F] = 0x2421


def text(value: object) -> str:
    """Returns the text of a value for use between tags or inside a quoted attribute.

    >>> text("<img src=x onerror='alert(1)'>")
    '&lt;img src=x onerror=&#x27;alert(1)&#x27;&gt;'
    """
    return escape(str(value).translate(_VISIBLE))


def page(title: str, body: str) -> str:
    """Returns the whole document.

    The content policy forbids scripts and every load, so that a completion that slipped
    through unescaped could still not run or call out.

    Args:
        title: plain text.
        body: HTML.
    """
    return _PAGE.substitute(title=text(title), style=_STYLE, body=body)


_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'">
<title>$title</title>
<style>
$style</style>
</head>
<body>
$body</body>
</html>
""")

_STYLE = """\
:root {
  color-scheme: light dark;
  --page: #ffffff; --ink: #16191d; --muted: #646b75; --rule: #e4e6ea;
  --soft: #f5f6f8; --accent: #2a5fc4; --good: #1b7a4b; --bad: #bb3a2c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #121417; --ink: #e6e8eb; --muted: #969da8; --rule: #2a2e34;
    --soft: #1a1d21; --accent: #7ba4f4; --good: #5cc08d; --bad: #ee8476;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 40px 32px 64px; max-width: 1200px;
  background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%;
}
h1 { margin: 0; font-size: 28px; line-height: 1.2; letter-spacing: -0.015em;
  overflow-wrap: anywhere; }
h2 { margin: 48px 0 16px; padding-top: 16px; border-top: 1px solid var(--rule);
  font-size: 17px; letter-spacing: -0.005em; }
h3 { margin: 0; font-size: 14px; font-weight: 600; }
p { margin: 4px 0 0; }
.muted, .sub { color: var(--muted); }
.sub { font-size: 13px; }
pre, code { font: 12.5px/1.55 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere;
  unicode-bidi: plaintext; }
.facts { display: flex; flex-wrap: wrap; gap: 12px 40px; margin: 24px 0 16px; }
.facts dt, .tile dt { color: var(--muted); font-size: 12.5px; }
.facts dd { margin: 0; overflow-wrap: anywhere; }
.command { padding: 10px 14px; background: var(--soft); border-radius: 6px; }

.tiles { display: flex; flex-wrap: wrap; gap: 16px 36px; margin: 32px 0 0;
  padding-top: 16px; border-top: 1px solid var(--rule); }
.tile { flex: 1 1 auto; }
.tile dd { margin: 0; }
.tile .value { font-size: 23px; line-height: 1.35; font-weight: 600;
  letter-spacing: -0.02em; white-space: nowrap; }
.tile .value i { font-style: normal; font-weight: 400; color: var(--muted); }

.grid { display: grid; gap: 32px 36px; grid-auto-flow: dense;
  grid-template-columns: repeat(6, minmax(0, 1fr)); }
.grid > * { grid-column: span 2; min-width: 0; margin: 0; }
.grid > .half { grid-column: span 3; }
.grid > .most { grid-column: span 4; }
.head { display: flex; align-items: baseline; gap: 8px; }
.head h3 { flex: 1; min-width: 0; overflow-wrap: anywhere; }
.head h3 span { color: var(--muted); font-weight: 400; }
.head b { font-weight: 600; font-size: 14px; }
figcaption .sub { margin: 0 0 12px; font-size: 12px; }

.plot { position: relative; display: grid; grid-template: 168px 22px / 46px 1fr;
  padding-right: 10px; font-size: 11.5px; line-height: 14px; color: var(--muted); }
.half .plot, .most .plot, .tall .plot { grid-template-rows: 220px 22px; }
.plot svg { display: block; width: 100%; height: 100%; overflow: visible; }
.plot .y, .plot .x { position: relative; }
.plot .y span { position: absolute; right: 8px; transform: translateY(50%);
  white-space: nowrap; }
.plot .x span { position: absolute; top: 8px; transform: translateX(-50%); }
.plot .unit { padding-top: 8px; text-align: right; padding-right: 8px; }
.plot .note { position: absolute; top: 2px; right: 12px; padding: 0 4px;
  background: var(--page); pointer-events: none; }
svg path, svg rect { vector-effect: non-scaling-stroke; }
svg path { fill: none; stroke-linejoin: round; stroke-linecap: round; }
path.rules { stroke: var(--rule); stroke-width: 1; shape-rendering: crispEdges; }
path.line { stroke: var(--accent); stroke-width: 1.75; }
path.raw { stroke: var(--accent); stroke-width: 1; opacity: 0.28; }
path.dots { stroke: var(--accent); stroke-width: 5; }
svg g rect { fill: transparent; }
svg g path { stroke: var(--accent); stroke-width: 8; opacity: 0; }
svg g:hover rect { fill: var(--accent); fill-opacity: 0.1; }
svg g:hover path { opacity: 1; }
rect.nan { fill: var(--bad); fill-opacity: 0.22; }
path.layer { stroke: none; }
path.cut { stroke: var(--ink); stroke-width: 5; }
.l0 { --shade: var(--accent); }
.l1 { --shade: color-mix(in oklab, var(--accent) 62%, var(--page)); }
.l2 { --shade: color-mix(in oklab, var(--accent) 34%, var(--page)); }
.l3 { --shade: color-mix(in oklab, var(--accent) 60%, var(--ink)); }
.l4 { --shade: color-mix(in oklab, var(--muted) 85%, var(--page)); }
.l5 { --shade: color-mix(in oklab, var(--muted) 50%, var(--page)); }
.l6 { --shade: color-mix(in oklab, var(--muted) 22%, var(--page)); }
path.layer { fill: var(--shade); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 10px 0 0 46px;
  padding: 0; list-style: none; font-size: 12.5px; }
.legend i { display: inline-block; width: 10px; height: 10px; margin-right: 6px;
  border-radius: 2px; background: var(--shade); }
.legend span { color: var(--muted); }

.example { margin: 24px 0 0; }
.example .head { margin-bottom: 4px; }
.pair { display: grid; gap: 8px 16px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
.pair > div { --shade: color-mix(in oklab, var(--good) var(--share), var(--bad));
  padding: 8px 14px 10px; background: var(--soft); border-radius: 6px;
  border-left: 3px solid var(--shade); }
.pair .sub { display: flex; gap: 10px; margin: 0 0 4px; }
.pair .sub b { margin-left: auto; color: var(--shade); }
.pair pre, .prompt { max-height: 260px; overflow: auto; }
.prompt { margin: 0 0 10px; color: var(--muted); max-height: 130px; }
.fold { margin-top: 48px; padding-top: 16px; border-top: 1px solid var(--rule); }
.fold + .fold { margin-top: 16px; }
.fold > summary { cursor: pointer; }
.fold > summary h2 { display: inline; margin: 0; padding: 0; border: 0; }
.fold > .grid, .fold > table { margin-top: 16px; }
table { width: 100%; border-collapse: collapse; font-size: 13px; }
td, th { padding: 4px 16px 4px 0; border-top: 1px solid var(--rule); text-align: left;
  vertical-align: top; overflow-wrap: anywhere; font-weight: 400; }
th { width: 38%; color: var(--muted); }
footer { margin-top: 48px; color: var(--muted); font-size: 12.5px; }
@media (max-width: 900px) {
  .grid > *, .grid > .half, .grid > .most { grid-column: span 3; }
}
@media (max-width: 640px) {
  body { padding: 24px 16px 48px; }
  h1 { font-size: 23px; }
  .tiles { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .tile .value { font-size: 18px; }
  .grid { gap: 28px; }
  .grid > *, .grid > .half, .grid > .most { grid-column: span 6; }
  .half .plot, .most .plot, .tall .plot { grid-template-rows: 180px 22px; }
  .facts { gap: 10px 28px; }
}
@media print {
  body { padding: 0; }
  figure, .example { break-inside: avoid; }
}
"""
