"""The page's style sheet: one column of text on paper, light or dark, narrow or printed."""

from __future__ import annotations

from collections.abc import Mapping

from eeplan.report.palette import DARK, EXIT_COLOURS, LIGHT

_SANS = '"Inter", "Helvetica Neue", "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif'
_SERIF = '"Iowan Old Style", "Palatino Linotype", Palatino, Charter, "Liberation Serif", Georgia, serif'
_MONO = '"SFMono-Regular", Menlo, Consolas, "Liberation Mono", monospace'

_RULES = """
* { box-sizing: border-box; }
html { color-scheme: light dark; -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 var(--serif); }
main { max-width: 1130px; margin: 0 auto; padding: 3.2rem 25px 4rem; }
h1, h2, p { margin: 0; }
p { text-wrap: pretty; }
.kicker, dt, dd, table, figcaption, .legend, svg, footer, .sample p { font-family: var(--sans); }
.kicker { font-size: .78rem; letter-spacing: .02em; color: var(--muted); }
h1 { font-size: clamp(1.75rem, 4.4vw, 2.75rem); line-height: 1.14; font-weight: 600;
  letter-spacing: -.012em; max-width: 22em; margin: .7rem 0 1rem; text-wrap: balance; }
h1 .error { white-space: nowrap; color: var(--muted); font-weight: 400; }
.standfirst { font-size: 1.14rem; line-height: 1.5; max-width: 46em; }
.standfirst + .standfirst { margin-top: .3rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: .9rem 2rem;
  margin: 2rem 0 0; padding: 1.1rem 0 1.2rem; border-top: 1px solid var(--ink);
  border-bottom: 1px solid var(--rule); }
dt { font-size: .72rem; color: var(--muted); }
dd { margin: .1rem 0 0; font-size: .86rem; line-height: 1.4; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
section { margin-top: 3.1rem; }
h2 { font-size: 1.36rem; line-height: 1.25; font-weight: 600; letter-spacing: -.006em;
  margin-bottom: .4rem; }
section > p { max-width: 46em; }
p.after { margin-top: .8rem; }
.columns { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 1.4rem 40px;
  margin-top: 1.5rem; align-items: start; }
.uneven { grid-template-columns: minmax(0, 64fr) minmax(0, 40fr); }
figure { margin: 1.4rem 0 0; }
.columns figure { margin-top: 0; }
.scroll { overflow-x: auto;
  background: linear-gradient(to right, var(--paper) 40%, transparent) local 0 0,
  linear-gradient(to left, var(--paper) 40%, transparent) local 100% 0,
  linear-gradient(to right, var(--rule), transparent) scroll 0 0,
  linear-gradient(to left, var(--rule), transparent) scroll 100% 0;
  background-repeat: no-repeat; background-size: 30px 100%, 30px 100%, 9px 100%, 9px 100%; }
.scroll + .scroll, section > .scroll { margin-top: 1.4rem; }
svg { display: block; width: 100%; height: auto; }
figcaption { font-size: .75rem; line-height: 1.45; color: var(--muted); margin-top: .45rem;
  max-width: 70em; }
.file { white-space: nowrap; }
.file::before { content: "\\2192\\00a0"; }
table { border-collapse: collapse; width: 100%; font-size: .84rem; line-height: 1.4;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; font-size: .84rem; font-weight: 600; padding-bottom: .35rem; }
th { font-weight: 400; font-size: .75rem; color: var(--muted); text-align: right; vertical-align: bottom;
  padding: 0 0 .35rem 1.1rem; border-bottom: 1px solid var(--ink); }
td { text-align: right; padding: .32rem 0 .32rem 1.1rem; border-bottom: 1px solid var(--rule);
  white-space: nowrap; vertical-align: top; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
.prose th, .prose td { text-align: left; white-space: normal; min-width: 7rem; }
.prose td:first-child { font-weight: 600; min-width: 6rem; }
.prose td:nth-child(3), .prose td:nth-child(4) { min-width: 14rem; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; margin: .9rem 0 .6rem; font-size: .8rem;
  white-space: pre; }
.sample { border-top: 1px solid var(--rule); padding: .8rem 0 .9rem; display: grid;
  grid-template-columns: minmax(0, 1fr) 13rem; gap: .3rem 40px; }
.sample p { font-size: .75rem; line-height: 1.5; color: var(--muted); margin-top: .25rem; }
.early { border-bottom: 2px solid var(--exit);
  background: color-mix(in srgb, var(--exit) 22%, transparent);
  -webkit-print-color-adjust: exact; print-color-adjust: exact; }
.e1, .e4 { border-bottom-style: dashed; }
.e2, .e5 { border-bottom-style: dotted; }
pre { font: .82rem/1.7 var(--mono); margin: .9rem 0 0; padding: .8rem 0; overflow-x: auto;
  border-top: 1px solid var(--rule); border-bottom: 1px solid var(--rule); }
.sample pre { font: .9rem/1.85 var(--mono); border: 0; padding: 0; margin: 0; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.prompt { color: var(--muted); }
code { font: inherit; }
footer { margin-top: 2.2rem; font-size: .75rem; color: var(--muted); }
@media screen and (max-width: 820px) {
  main { padding: 1.6rem 16px 3rem; }
  .columns, .uneven { grid-template-columns: minmax(0, 1fr); gap: 1.6rem; }
  .wide svg { width: 860px; max-width: none; }
  .columns svg { min-width: 400px; }
  .uneven svg { min-width: 500px; }
  table { font-size: .78rem; }
  th, td { padding-left: .7rem; }
  .sample { grid-template-columns: minmax(0, 1fr); }
  section { margin-top: 2.4rem; }
}
@media print {
  main { max-width: none; padding: 0; }
  body { font-size: 10.5pt; }
  h1 { font-size: 22pt; }
  section { margin-top: 1.6rem; }
  figure, table, .sample, h2 + p { break-inside: avoid; }
  h2 { break-after: avoid; }
  .columns, .uneven, .sample { grid-template-columns: minmax(0, 1fr); }
  .columns svg { max-width: 5.4in; }
  .scroll { overflow: visible; background: none; }
  .prose td { min-width: 0; }
}
"""


def style_sheet() -> str:
    """CSS of the whole page, colours as variables that follow the reader's scheme; print is always light."""
    exits = "\n".join(f".e{i} {{ --exit: {colour}; }}" for i, colour in enumerate(EXIT_COLOURS))
    return (
        f":root {{ --sans: {_SANS}; --serif: {_SERIF}; --mono: {_MONO}; }}\n"
        f":root {{ {_variables(LIGHT)} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}\n"
        f"{_RULES}{exits}\n"
    )


def _variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())
