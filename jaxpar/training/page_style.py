"""How a run's page looks, on a wide screen and on a telephone."""

STYLE = """
:root { color-scheme: light; --line: #d8dde3; --soft: #f5f7f9; --quiet: #5b6570; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; color: #1b2127; background: #fff;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
header p { margin: 0; color: var(--quiet); font-family: ui-monospace, "DejaVu Sans Mono", monospace;
  font-size: .85rem; overflow-wrap: anywhere; }
h1 { margin: 0; font-size: 1.6rem; overflow-wrap: anywhere; }
h2 { margin: 2rem 0 .75rem; padding-bottom: .25rem; border-bottom: 1px solid var(--line); font-size: 1.15rem; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: .5rem; margin: 1rem 0 0; }
dl div { padding: .5rem .75rem; background: var(--soft); border-radius: .4rem; }
dt { color: var(--quiet); font-size: .8rem; }
dd { margin: 0; font-weight: 600; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
img { display: block; width: 100%; height: auto; }
img.narrow { display: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem 1rem .25rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { color: var(--quiet); font-weight: 500; white-space: nowrap; }
td { overflow-wrap: break-word; }
details td, table.cards td { overflow-wrap: anywhere; }
details td:first-child, table.cards td:first-child { overflow-wrap: normal; }
section p { margin: .5rem 0; color: var(--quiet); font-size: .9rem; overflow-wrap: anywhere; }
table.cards { font-size: .8rem; }
table.cards td:first-child { font-weight: 600; }
pre { margin: 0; padding: .75rem; background: var(--soft); border-radius: .4rem; font-size: .8rem; line-height: 1.4;
  font-family: ui-monospace, "DejaVu Sans Mono", monospace; }
pre.wrap { white-space: pre-wrap; overflow-wrap: anywhere; }
summary { padding: .4rem 0; cursor: pointer; }
@media (max-width: 640px) {
  body { padding: .75rem; }
  dl { grid-template-columns: repeat(2, 1fr); }
  img.wide { display: none; }
  img.narrow { display: block; }
  table.cards, table.cards tbody { display: block; }
  table.cards thead { display: none; }
  table.cards tr { display: block; padding: .4rem 0; border-bottom: 1px solid var(--line); }
  table.cards td { display: block; padding: 0; border: 0; }
  table.cards td:first-child { overflow-wrap: anywhere; }
  table.cards td:empty { display: none; }
  table.cards td:not(:first-child)::before { content: attr(data-column) " "; color: var(--quiet); }
}
@media print { details > * { display: block; } }
"""
