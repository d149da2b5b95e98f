"""The stylesheet of the panel: JupyterLab's theme variables, with values for pages without them.

Everything is scoped under `.memlab-panel`, but for the rule that hides the still picture beside it.
Boxes have fixed heights, so that nothing moves that was not touched. The breakpoints ask for the
width of the panel, not of the window.
"""

RUN_BY_CELL = "a cell is running it: interrupt the kernel to stop it"
PLAYED_BACK = "is another machine: Run shows what was measured there"
NOT_HERE = "is not in this machine: you can keep its predictions, not run it"
KEEPING = "is added to the table as soon as it is exact"
GONE = "The kernel was restarted or has died: run this cell again to get a working panel."

CSS = """
.jp-OutputArea:has(.memlab-panel) .jp-OutputArea-child:has(.memlab-still) { display: none; }
.memlab-panel { container-type: inline-size; max-width: 1320px; overflow: visible;
  color: var(--jp-ui-font-color1, #222); font-family: var(--jp-ui-font-family, sans-serif);
  font-size: 13px; line-height: 1.4; padding: 4px 2px 8px;
  --memlab-line: var(--jp-border-color2, #ddd); --memlab-quiet: var(--jp-ui-font-color2, #666);
  --memlab-good: #1b7f4b; --memlab-bad: #c22f45; --memlab-warn: #9a6200; }
[data-jp-theme-light="false"] .memlab-panel {
  --memlab-good: #58c98b; --memlab-bad: #ff8095; --memlab-warn: #e8b04a; }
.memlab-panel .lm-Widget { overflow: visible; }
.memlab-panel .widget-html-content { font-size: 13px; line-height: 1.4; color: inherit; }
.memlab-panel .widget-html { margin: 0; min-width: 0; height: auto; }
.memlab-panel .jupyter-button.mod-active { box-shadow: none; color: #fff;
  background: var(--jp-brand-color1, #1976d2); }
.memlab-panel .widget-checkbox .widget-label-basic { display: flex; align-items: center; gap: 7px; }
.memlab-panel .widget-checkbox input { margin: 0; }
.memlab-panel input:focus-visible, .memlab-panel button:focus-visible,
.memlab-panel select:focus-visible, .memlab-panel .noUi-handle:focus-visible {
  outline: 2px solid var(--jp-brand-color1, #1976d2); outline-offset: 1px; }
.memlab-panel .memlab-hidden, .memlab-panel .memlab-gone { display: none; }
.memlab-panel.jupyter-widgets-disconnected .memlab-gone { display: block; }
.memlab-panel.jupyter-widgets-disconnected .memlab-live { opacity: 0.45; pointer-events: none; }
.memlab-panel.jupyter-widgets-disconnected::before,
.memlab-panel .jupyter-widgets-disconnected::before { content: none; display: none; }
.memlab-panel .memlab-gone div { border-left: 3px solid var(--memlab-bad); padding: 4px 10px;
  font-weight: 600; color: var(--memlab-bad); }

.memlab-panel .memlab-header { display: flex; flex-wrap: wrap; gap: 2px 10px;
  align-items: center; overflow: visible; }
.memlab-panel .memlab-header .widget-label { width: auto; min-width: 0; margin-right: 6px;
  color: var(--memlab-quiet); }
.memlab-panel .memlab-header .widget-dropdown, .memlab-panel .memlab-header .widget-text {
  width: auto; max-width: 100%; margin: 2px 0; }
.memlab-panel .memlab-header .widget-dropdown select { width: auto; min-width: 100px; }
.memlab-panel .memlab-header .widget-text input { width: 158px; flex: none; }
.memlab-panel .memlab-header .memlab-fit-button { width: auto; height: 28px; line-height: 28px;
  padding: 0 10px; margin: 2px 0; }
.memlab-panel .memlab-toggles { margin-left: auto; gap: 6px; overflow: visible; }
.memlab-panel .memlab-header .widget-toggle-button { width: auto; min-width: 30px; padding: 0 9px;
  margin: 2px 0; }
.memlab-panel .memlab-line-row { display: flex; align-items: center; gap: 10px; height: 26px;
  overflow: hidden; }
.memlab-panel .memlab-line-row .widget-html { flex: 0 1 auto; }
.memlab-panel .memlab-line-row .memlab-line { display: block; white-space: nowrap;
  text-overflow: ellipsis; }
.memlab-panel .memlab-line-row .memlab-remedy { flex: none; width: auto; margin: 0 0 0 auto;
  padding: 0 8px; height: 24px; line-height: 24px; font-size: 12px; }
.memlab-panel .memlab-pane { border: 1px solid var(--memlab-line); border-radius: 3px;
  padding: 8px 12px; margin: 4px 0; overflow-x: auto; user-select: text; }
.memlab-panel .memlab-pane pre { margin: 0; font-size: 12px; line-height: 1.5; padding: 0;
  font-family: var(--jp-code-font-family, monospace); color: inherit; background: none; }
.memlab-panel .memlab-pane p { margin: 0 0 5px; max-width: 90ch; }

.memlab-panel .memlab-failure [role=alert] { border: 2px solid var(--memlab-bad);
  border-radius: 4px; padding: 10px 14px; margin: 6px 0; font-size: 15px; }
.memlab-panel .memlab-failure b { color: var(--memlab-bad); font-size: 17px; }
.memlab-panel .memlab-failure p { margin: 4px 0 0; overflow-wrap: anywhere; }
.memlab-panel .memlab-past { opacity: 0.6; }

.memlab-panel .memlab-body { display: grid; gap: 10px 22px; overflow: visible;
  grid-template-columns: minmax(0, 1fr); align-items: start; }
.memlab-panel .memlab-controls { overflow: visible; min-width: 0; }
.memlab-panel table.memlab-savings { font-size: 12px; color: inherit; margin: 6px 0 0; }
.memlab-panel table.memlab-savings th, .memlab-panel table.memlab-savings td { text-align: left;
  vertical-align: top; padding: 2px 8px 2px 0; }

.memlab-panel .memlab-row { display: grid; align-items: center; overflow: visible; column-gap: 10px;
  grid-template-columns: minmax(0, 112px) minmax(60px, 1fr) 92px; row-gap: 0; align-content: start;
  min-height: 66px; margin: 0; }
.memlab-panel .memlab-row > * { min-width: 0; }
.memlab-panel .memlab-row .widget-slider, .memlab-panel .memlab-row .memlab-slider {
  grid-column: 2; grid-row: 1; width: auto; margin: 0; }
.memlab-panel .memlab-row .memlab-box { display: contents; }
.memlab-panel .memlab-box .widget-label { grid-column: 1; grid-row: 1; width: auto; margin: 0;
  padding: 0; text-align: left; justify-content: flex-start; color: inherit; white-space: normal;
  line-height: 1.15; height: auto; }
.memlab-panel .memlab-box input { grid-column: 3; grid-row: 1; width: 100%; text-align: right; }
.memlab-panel .memlab-row .memlab-explanation { grid-column: 1 / 3; grid-row: 2;
  align-self: start; min-height: 34px; }
.memlab-panel .memlab-row .memlab-remedy { grid-column: 3; grid-row: 2; align-self: start;
  width: auto; max-width: 100%; margin: 0; padding: 4px; height: auto; min-height: 24px;
  line-height: 16px; white-space: normal; font-size: 12px; }
.memlab-panel .memlab-row .memlab-remedy[style*="hidden"] { display: none; }
.memlab-panel .memlab-row:not(:has(.memlab-remedy:not([style*="hidden"]))) .memlab-explanation {
  grid-column: 1 / 4; }
.memlab-panel .noUi-handle::after { content: ""; display: block; position: absolute; inset: -5px;
  background: none; width: auto; height: auto; }
.memlab-panel .memlab-choice-row { grid-template-columns: 70px minmax(0, 1fr) 92px; }
.memlab-panel .memlab-choice-row .widget-toggle-buttons { display: contents; }
.memlab-panel .memlab-choice-row .widget-toggle-buttons > .widget-label { grid-column: 1;
  grid-row: 1; width: auto; margin: 0; padding: 0; text-align: left;
  justify-content: flex-start; color: inherit; }
.memlab-panel .memlab-choice-row .widget-toggle-buttons > div { grid-column: 2 / 4; grid-row: 1;
  display: flex; flex-wrap: wrap; gap: 3px; margin: 0; min-height: 78px;
  align-content: flex-start; }
.memlab-panel .memlab-choice-row .widget-toggle-button { width: auto; flex: 0 0 auto; margin: 0;
  padding: 0 6px; height: 24px; line-height: 24px; font-size: 12px; }
.memlab-panel .memlab-line { display: -webkit-box; -webkit-box-orient: vertical;
  -webkit-line-clamp: 2; overflow: hidden; max-height: 37px; }
.memlab-panel .memlab-line-open { color: var(--memlab-quiet); }
.memlab-panel .memlab-line-warn { color: var(--memlab-warn); }
.memlab-panel .memlab-line-bad { color: var(--memlab-bad); }
.memlab-panel .memlab-verdict { white-space: normal; }
.memlab-panel .memlab-line .memlab-verdict { margin-left: 8px; }
.memlab-panel .memlab-grid .memlab-verdict { white-space: nowrap; }
.memlab-panel .memlab-good { color: var(--memlab-good); }
.memlab-panel .memlab-bad { color: var(--memlab-bad); }
.memlab-panel .memlab-warn { color: var(--memlab-warn); }
.memlab-panel .memlab-open { color: var(--memlab-quiet); }

.memlab-panel .memlab-more-row { overflow: visible; }
.memlab-panel .memlab-more-row .widget-toggle-button { width: auto; max-width: calc(100% - 6px);
  margin: 2px 6px 2px 0; padding: 0 9px; overflow: hidden; text-overflow: ellipsis; }
.memlab-panel .memlab-panes { display: flex; flex-wrap: wrap; }
.memlab-panel .memlab-panes .widget-toggle-button { flex: none; }
.memlab-panel .memlab-more { display: flex; flex-wrap: wrap; gap: 2px 18px; align-items: center; }
.memlab-panel .memlab-more .widget-label { width: auto; margin-right: 6px; }
.memlab-panel .memlab-more .widget-dropdown { width: auto; max-width: calc(100% - 4px); }
.memlab-panel .memlab-more .widget-dropdown select { min-width: 0; }
.memlab-panel .memlab-more .widget-checkbox { width: auto; }
.memlab-panel .memlab-more .memlab-explanation { flex: 1 1 300px; min-height: 20px; }
.memlab-panel .memlab-more .memlab-remedy { width: auto; margin: 0; }

.memlab-panel .memlab-choices { overflow: visible; margin: 0 0 4px; flex: none; }
.memlab-panel .memlab-choices .memlab-explanation { flex: 1 1 auto; height: 40px; }

.memlab-panel .memlab-run-row { display: flex; flex-wrap: wrap; gap: 4px 12px;
  align-items: center; margin-top: 6px; padding-top: 8px; overflow: visible;
  border-top: 1px solid var(--memlab-line); }
.memlab-panel .memlab-run-row .jupyter-button { width: 84px; margin: 0; }
.memlab-panel .memlab-run-row .memlab-run { width: 158px; }
.memlab-panel .memlab-run-row .widget-checkbox { width: auto; margin: 0; }
.memlab-panel .memlab-run-row .widget-hprogress { flex: 1 1 100px; width: auto; min-width: 80px;
  max-width: 140px; margin: 0; height: 14px; }
.memlab-panel .memlab-outlook { height: 60px; overflow: hidden; }
.memlab-panel .memlab-outlook .widget-html-content { overflow: hidden; }
.memlab-panel .memlab-fit { font-weight: 600; min-height: 20px; max-height: 40px;
  overflow: hidden; }
.memlab-panel .memlab-costs { height: 37px; overflow: hidden; color: var(--memlab-quiet);
  font-variant-numeric: tabular-nums; }
.memlab-panel .memlab-status { height: 56px; overflow: hidden; margin-top: 4px; }
.memlab-panel .memlab-printed p { margin: 0; color: var(--memlab-quiet); }
.memlab-panel .memlab-printed pre { max-height: 150px; overflow: auto; margin: 2px 0 0;
  padding: 6px 8px; font-size: 11px; line-height: 1.4; color: inherit;
  background: var(--jp-layout-color2, #f3f3f3);
  font-family: var(--jp-code-font-family, monospace); }
.memlab-panel .memlab-note { position: absolute; z-index: 6; top: 48%; left: 50%;
  width: max-content; max-width: 86%; transform: translate(-50%, -50%);
  text-align: center; pointer-events: none; }
.memlab-panel .memlab-note p { margin: 0; padding: 6px 14px; border-radius: 4px;
  border: 1px solid var(--memlab-warn); color: var(--jp-ui-font-color1, #222);
  background: var(--jp-layout-color1, #fff); }

.memlab-panel .memlab-memory { overflow: visible; position: relative; min-width: 0; }
.memlab-panel .memlab-charts { display: grid; overflow: visible; gap: 6px 18px; margin-top: 8px;
  grid-template-columns: repeat(auto-fit, minmax(min(280px, 100%), 1fr)); }
.memlab-panel .memlab-figure { width: 100%; display: flex; align-items: center;
  justify-content: center; }
.memlab-panel .memlab-picture-timeline .memlab-figure,
.memlab-panel .memlab-picture-peak .memlab-figure { position: relative; }
.memlab-panel .memlab-part-buttons { display: flex; align-items: center; gap: 8px; width: 100%;
  height: auto; min-height: 28px; margin: 2px 0 0; overflow: visible; }
.memlab-panel .memlab-part-buttons > .widget-label { width: auto; flex: none; margin: 0;
  padding: 0; color: var(--memlab-quiet); }
.memlab-panel .memlab-part-buttons > div { display: flex; flex-wrap: wrap; gap: 3px; }
.memlab-panel .memlab-part-buttons .widget-toggle-button { width: auto; flex: none; margin: 0;
  padding: 0 6px; height: 24px; line-height: 24px; font-size: 12px; }
.memlab-panel .memlab-spots { position: absolute; display: grid; z-index: 3; }
.memlab-panel .memlab-parts { z-index: 8; }
.memlab-panel .memlab-parts .memlab-reading { top: calc(100% + 4px); }
.memlab-panel .memlab-spot { display: block; cursor: crosshair; min-width: 0; }
.memlab-panel .memlab-spot input { position: absolute; opacity: 0; pointer-events: none;
  width: 1px; height: 1px; margin: 0; }
.memlab-panel .memlab-reading { display: none; position: absolute; top: 2px; z-index: 7;
  max-width: 62%; padding: 5px 10px; border-radius: 4px; font-size: 12px; line-height: 1.5;
  border: 1px solid var(--memlab-line); pointer-events: none; overflow-wrap: anywhere;
  color: var(--jp-ui-font-color1, #222); background: var(--jp-layout-color1, #fff); }
.memlab-panel .memlab-right { right: 2px; }
.memlab-panel .memlab-left { left: 2px; }
.memlab-panel .memlab-reading i { display: inline-block; width: 9px; height: 9px;
  border-radius: 2px; margin-right: 5px; }
.memlab-panel .memlab-reading em { font-style: normal; color: var(--memlab-quiet); }
.memlab-panel .memlab-spot:hover,
.memlab-panel .memlab-spots:not(:hover) .memlab-spot:has(input:checked) {
  border-left: 1.5px solid var(--jp-ui-font-color1, #222); }
.memlab-panel .memlab-spot:hover .memlab-reading,
.memlab-panel .memlab-memory:not(:has(.memlab-spots:hover)) .memlab-spot:has(input:checked)
  .memlab-reading { display: block; }
.memlab-panel .memlab-spots:has(input:focus-visible) {
  outline: 2px solid var(--jp-brand-color1, #1976d2); outline-offset: 2px; }
.memlab-panel .memlab-answer { height: 264px; overflow: auto; padding: 6px 10px; margin: 2px 0;
  border: 1px solid var(--memlab-line); border-radius: 3px; }
.memlab-panel .memlab-answer > * { flex: none; }
.memlab-panel .memlab-answer p { margin: 0 0 4px; max-width: 110ch; }
.memlab-panel .memlab-answer ul { margin: 0; padding-left: 18px; }
.memlab-panel .memlab-fits-row { display: flex; align-items: center; gap: 10px; min-height: 30px; }
.memlab-panel .memlab-fits-here { box-shadow: inset 3px 0 var(--jp-brand-color1, #1976d2);
  padding-left: 8px; }
.memlab-panel .memlab-fits-row .jupyter-button { flex: none; width: 58px; height: 26px;
  line-height: 26px; padding: 0; margin: 0; }
.memlab-panel .memlab-fits-row .widget-html { flex: 1 1 auto; min-width: 0;
  font-variant-numeric: tabular-nums; }
.memlab-panel .memlab-base-again { display: flex; align-items: center; gap: 10px;
  min-height: 30px; }
.memlab-panel .memlab-base-again .jupyter-button { flex: none; width: auto; height: 26px;
  line-height: 26px; padding: 0 10px; margin: 0; }
.memlab-panel .memlab-base-again p { margin: 0; }
.memlab-panel .memlab-causes table { font-size: 12px; color: inherit; margin: 0 0 6px; }
.memlab-panel .memlab-causes th, .memlab-panel .memlab-causes td { vertical-align: top;
  padding: 2px 12px 2px 0; }
.memlab-panel .memlab-causes td:nth-child(2) { white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.memlab-panel .memlab-details { display: grid; gap: 6px 18px; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); }
.memlab-panel .memlab-explained { height: 380px; min-width: 0; overflow: hidden; }
.memlab-panel .memlab-scrolled { height: 380px; overflow: auto; }
.memlab-panel .memlab-explained table { font-size: 12px; color: inherit; margin: 0 0 8px; }
.memlab-panel .memlab-explained th, .memlab-panel .memlab-explained td { text-align: left;
  vertical-align: top; padding: 2px 8px 2px 0; }
.memlab-panel .memlab-explained td:nth-child(-n + 2) { white-space: nowrap; }
.memlab-panel .memlab-sent { min-height: 190px; min-width: 0; }
.memlab-panel .memlab-sent p { margin: 0 0 6px; }
.memlab-panel .memlab-sent table { font-size: 12px; color: inherit; margin: 0; }
.memlab-panel .memlab-sent th, .memlab-panel .memlab-sent td { padding: 2px 10px 2px 0; }
.memlab-panel .memlab-waiting { border: 1px dashed var(--memlab-line); border-radius: 4px;
  box-sizing: border-box; }
.memlab-panel .memlab-figure p { color: var(--memlab-quiet); margin: 0; padding: 0 12px;
  text-align: center; }
.memlab-panel .memlab-figure svg { width: 100%; height: 100%; display: block; }
.memlab-panel .memlab-stale .memlab-details,
.memlab-panel .memlab-stale .memlab-memory .memlab-figure { opacity: 0.5;
  filter: grayscale(0.6); }

.memlab-panel .memlab-table-box, .memlab-panel .memlab-cards { overflow: visible; min-width: 0; }
.memlab-panel .memlab-table-bar { display: flex; flex-wrap: wrap; align-items: center;
  gap: 2px 12px; overflow: visible; }
.memlab-panel .memlab-table-bar > * { width: auto; margin: 2px 0; flex: none; }
.memlab-panel .memlab-table-bar .widget-label { width: auto; margin-right: 6px;
  color: var(--memlab-quiet); }
.memlab-panel .memlab-table-bar .widget-dropdown select { width: 130px; flex: none; }
.memlab-panel .memlab-table-bar input { width: 130px; flex: none; }
.memlab-panel .memlab-table-bar .jupyter-button { padding: 0 12px; }
.memlab-panel .memlab-table-bar .memlab-stopped, .memlab-panel .memlab-table-bar .memlab-clear {
  width: 92px; padding: 0; }
.memlab-panel .memlab-count { min-width: 96px; color: var(--memlab-quiet);
  font-variant-numeric: tabular-nums; }
.memlab-panel .memlab-csv { display: inline-block; line-height: 26px; padding: 0 6px;
  color: var(--jp-content-link-color, #0b62c4); text-decoration: underline; }
.memlab-panel .memlab-csv.memlab-open { color: var(--memlab-quiet); text-decoration: none; }
.memlab-panel .memlab-csv:focus-visible { outline: 2px solid var(--jp-brand-color1, #1976d2); }
.memlab-panel .memlab-table-bar .memlab-name { margin-left: auto; }
.memlab-panel .memlab-name .widget-label { width: 98px; justify-content: flex-end; }
.memlab-panel .memlab-table-body { height: 192px; overflow: auto; align-items: flex-start;
  border-top: 1px solid var(--memlab-line); --memlab-back: var(--jp-layout-color0, #fff); }
.memlab-panel .memlab-grid { flex: 1 0 auto; overflow: visible; }
.memlab-panel .memlab-grid p { margin: 6px 7px; color: var(--memlab-quiet); }
.memlab-panel .memlab-grid table { border-collapse: separate; border-spacing: 0; width: 100%;
  margin: 0; font-size: 12px; color: inherit; table-layout: auto; }
.memlab-panel .memlab-grid tr { height: 29px; background: var(--memlab-back); }
.memlab-panel .memlab-grid th, .memlab-panel .memlab-grid td { padding: 0 5px; height: 28px;
  text-align: left; white-space: nowrap; vertical-align: middle; border: 0; max-width: none;
  line-height: 16px; border-bottom: 1px solid var(--memlab-line); background: inherit; }
.memlab-panel .memlab-grid th { position: sticky; top: 0; z-index: 2; height: 36px;
  font-size: 11px; font-weight: 500; white-space: normal; color: var(--memlab-quiet); }
.memlab-panel .memlab-grid th.memlab-number { width: 1px; }
.memlab-panel .memlab-grid td:first-child { position: sticky; left: 0; z-index: 1; }
.memlab-panel .memlab-grid th:first-child { left: 0; z-index: 3; }
.memlab-panel .memlab-grid .memlab-number { text-align: right;
  font-variant-numeric: tabular-nums; }
.memlab-panel .memlab-grid tr.memlab-compared { background: color-mix(in srgb,
  var(--jp-layout-color2, #eee) 40%, var(--memlab-back)); }
.memlab-panel .memlab-grid tr.memlab-compared td:first-child {
  box-shadow: inset 3px 0 var(--jp-brand-color1, #1976d2); }
.memlab-panel .memlab-grid tr.memlab-predicted { font-style: italic; }
.memlab-panel .memlab-grid td.memlab-long { max-width: 16ch; overflow: hidden;
  text-overflow: ellipsis; }
.memlab-panel .memlab-row-buttons { flex: none; overflow: visible; position: sticky; right: 0;
  z-index: 3; background: var(--memlab-back); }
.memlab-panel .memlab-corner { position: sticky; top: 0; z-index: 4; height: 37px; flex: none;
  background: var(--memlab-back); }
.memlab-panel .memlab-row-buttons .widget-hbox { height: 29px; gap: 4px; align-items: center;
  padding-left: 6px; overflow: visible; flex: none; }
.memlab-panel .memlab-row-buttons button { width: auto; height: 24px; line-height: 24px;
  padding: 0 7px; font-size: 0; margin: 0; }
.memlab-panel .memlab-row-buttons button::before { font-size: 11px; }
.memlab-panel .memlab-pin::before { content: "pin" / ""; }
.memlab-panel .memlab-compare::before { content: "compare" / ""; }
.memlab-panel .memlab-show::before { content: "show" / ""; }
.memlab-panel .memlab-json { display: none; }

@container (min-width: 780px) {
  .memlab-panel .memlab-body { grid-template-columns: minmax(340px, 4fr) minmax(0, 6fr); }
  .memlab-panel .memlab-memory { position: sticky; top: 4px; }
}
@container (max-width: 480px) {
  .memlab-panel .memlab-row { grid-template-columns: 96px minmax(40px, 1fr) 76px; }
  .memlab-panel .memlab-line-row { height: 44px; }
  .memlab-panel .memlab-line-row .memlab-line { white-space: normal; }
  .memlab-panel .memlab-outlook { height: 100px; }
  .memlab-panel .memlab-status { height: 76px; }
  .memlab-panel .memlab-choice-row { grid-template-columns: 70px minmax(0, 1fr); }
  .memlab-panel .memlab-panes { min-height: 64px; align-content: flex-start; }
  /* these pictures reckon with 5.4 units for a letter, which fonts of this size stay below */
  .memlab-panel .memlab-picture-timeline text, .memlab-panel .memlab-picture-peak text {
    font-size: 10px !important; }
}
"""


# What core widgets leave out for people who use a keyboard or a screen reader, as a small
# script.
#
# ipywidgets gives the handle of a slider no name and announces its position (6) where a
# person needs the value (64), which a class of the slider lists for each position. Its
# toggles do not say whether they are pressed, and a key that is pressed on one of them is
# also a shortcut of the notebook (`d d` deletes the cell). None of this can be changed from
# Python. The script comes with the output that a saved notebook keeps; where a page does
# not run it, the panel works as before.

SCRIPT = """<script>(() => {
  if (window.memlabAccess) return;
  window.memlabAccess = true;
  const set = (element, name, value) => {
    if (element.getAttribute(name) !== value) element.setAttribute(name, value); };
  const box = handle => handle.closest('.memlab-row')?.querySelector('.memlab-box input');
  const values = handle => [...(handle.closest('.memlab-slider')?.classList || [])]
    .find(name => name.startsWith('memlab-at-'))?.split('-').slice(2).map(Number) || [];
  const announce = handle => {
    const all = values(handle), typed = +box(handle)?.value;
    const here = all[Math.round(handle.getAttribute('aria-valuenow'))];
    if (!here) return;
    const far = value => Math.abs(Math.log(value / typed));
    const isOfBox = typed > 0 && all.every(value => far(here) <= far(value));  // 48 is between two
    set(handle, 'aria-valuetext', '' + (isOfBox ? typed : here)); };
  const name = panel => {
    for (const handle of panel.querySelectorAll('.noUi-handle')) {
      set(handle, 'aria-label', (box(handle)?.labels?.[0]?.textContent || 'value') + ' slider');
      announce(handle);
    }
    for (const toggle of panel.querySelectorAll('.widget-toggle-button'))
      set(toggle, 'aria-pressed', '' + toggle.classList.contains('mod-active'));
  };

  const watched = new WeakSet();
  const watch = panel => {
    watched.add(panel);
    name(panel);
    let waits = false;
    new MutationObserver(changes => {
      changes.filter(change => change.attributeName === 'aria-valuenow')
        .forEach(change => announce(change.target));
      if (waits) return;
      waits = true;
      requestAnimationFrame(() => { waits = false; name(panel); });
    }).observe(
      panel, {subtree: true, childList: true, attributeFilter: ['aria-valuenow', 'class']});
  };
  const look = () => document.querySelectorAll('.memlab-panel').forEach(
    panel => watched.has(panel) || watch(panel));
  look();
  new MutationObserver(look).observe(document.body, {subtree: true, childList: true});

  document.addEventListener('focusin', event => {
    if (event.target.matches('.memlab-panel .noUi-handle')) announce(event.target); });
  window.addEventListener('keydown', event => {  // before the notebook sees the key
    if (event.target.closest?.('.memlab-panel'))
      event.target.dataset.lmSuppressShortcuts = !(event.ctrlKey || event.metaKey || event.altKey);
  }, true);
})();</script>"""
