"""The stylesheet of the panel: JupyterLab's theme variables, with values for pages without them.

Everything is scoped under `.memlab-panel`, but for the rule that hides the still picture beside it.
Boxes have fixed heights, so that nothing moves that was not touched. The breakpoints ask for the
width of the panel, not of the window.
"""

RUN_BY_CELL = "a cell is running it: interrupt the kernel to stop it"
PLAYED_BACK = "was recorded elsewhere: Run shows its recorded runs, and nothing is measured here"
NOT_HERE = "is not in this machine, so Run is off and all numbers for it are predicted"
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
  width: auto; margin: 2px 0; }
.memlab-panel .memlab-header .widget-dropdown select { width: auto; min-width: 100px; }
.memlab-panel .memlab-header .widget-text input { width: 84px; flex: none; }
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

.memlab-panel .memlab-row { display: grid; align-items: center; overflow: visible; column-gap: 12px;
  grid-template-columns: 106px minmax(140px, 300px) 64px minmax(0, 1fr) 104px;
  min-height: 38px; margin: 0; }
.memlab-panel .memlab-row > * { min-width: 0; }
.memlab-panel .memlab-row .widget-slider, .memlab-panel .memlab-row .memlab-slider {
  grid-column: 2; grid-row: 1; width: auto; margin: 0; }
.memlab-panel .memlab-row .memlab-box { display: contents; }
.memlab-panel .memlab-box .widget-label { grid-column: 1; grid-row: 1; width: auto; margin: 0;
  padding: 0; text-align: left; justify-content: flex-start; color: inherit; }
.memlab-panel .memlab-box input { grid-column: 3; grid-row: 1; width: 100%; text-align: right; }
.memlab-panel .memlab-row .memlab-explanation { grid-column: 4; grid-row: 1; }
.memlab-panel .memlab-row .memlab-remedy { grid-column: 5; grid-row: 1; width: auto; margin: 0;
  padding: 0 4px; height: 24px; line-height: 24px; font-size: 12px; }
.memlab-panel .memlab-choice-row .widget-toggle-buttons { display: contents; }
.memlab-panel .memlab-choice-row .widget-toggle-buttons > .widget-label { grid-column: 1;
  grid-row: 1; width: auto; margin: 0; padding: 0; text-align: left;
  justify-content: flex-start; color: inherit; }
.memlab-panel .memlab-choice-row .widget-toggle-buttons > div { grid-column: 2 / 6; grid-row: 1;
  display: flex; flex-wrap: wrap; gap: 4px; margin: 0; }
.memlab-panel .memlab-choice-row .widget-toggle-button { width: auto; flex: 0 0 auto; margin: 0;
  padding: 0 8px; }
.memlab-panel .memlab-choice-row .memlab-explanation { grid-column: 2 / 5; grid-row: 2; }
.memlab-panel .memlab-choice-row .memlab-remedy { grid-row: 2; }
.memlab-panel .memlab-line { display: -webkit-box; -webkit-box-orient: vertical;
  -webkit-line-clamp: 2; overflow: hidden; max-height: 37px; }
.memlab-panel .memlab-line-open { color: var(--memlab-quiet); }
.memlab-panel .memlab-line-warn { color: var(--memlab-warn); }
.memlab-panel .memlab-line-bad { color: var(--memlab-bad); }
.memlab-panel .memlab-verdict { white-space: normal; }
.memlab-panel .memlab-line .memlab-verdict { margin-left: 8px; }
.memlab-panel table.memlab-runs .memlab-verdict { white-space: nowrap; }
.memlab-panel .memlab-good { color: var(--memlab-good); }
.memlab-panel .memlab-bad { color: var(--memlab-bad); }
.memlab-panel .memlab-warn { color: var(--memlab-warn); }
.memlab-panel .memlab-open { color: var(--memlab-quiet); }

.memlab-panel .memlab-more-row { overflow: visible; }
.memlab-panel .memlab-more-row .widget-toggle-button { width: auto; margin: 2px 0;
  padding: 0 9px; }
.memlab-panel .memlab-more { display: flex; flex-wrap: wrap; gap: 2px 18px; align-items: center; }
.memlab-panel .memlab-more .widget-label { width: auto; margin-right: 6px; }
.memlab-panel .memlab-more .widget-dropdown { width: auto; }
.memlab-panel .memlab-more .widget-checkbox { width: auto; }
.memlab-panel .memlab-more .memlab-explanation { flex: 1 1 300px; min-height: 20px; }
.memlab-panel .memlab-more .memlab-remedy { width: auto; margin: 0; }

.memlab-panel .memlab-run-row { display: flex; flex-wrap: wrap; gap: 4px 12px;
  align-items: center; margin-top: 6px; padding-top: 8px; overflow: visible;
  border-top: 1px solid var(--memlab-line); }
.memlab-panel .memlab-run-row .jupyter-button { width: 84px; margin: 0; }
.memlab-panel .memlab-run-row .widget-checkbox { width: auto; margin: 0; }
.memlab-panel .memlab-run-row .widget-hprogress { flex: 1 1 100px; width: auto; min-width: 80px;
  max-width: 140px; margin: 0; height: 14px; }
.memlab-panel .memlab-outlook { flex: 1 1 500px; min-width: 0; height: 40px; overflow: hidden;
  text-align: right; }
.memlab-panel .memlab-outlook .widget-html-content { overflow: hidden; }
.memlab-panel .memlab-fit { font-weight: 600; height: 20px; overflow: hidden; }
.memlab-panel .memlab-costs { height: 20px; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; color: var(--memlab-quiet); font-variant-numeric: tabular-nums; }
.memlab-panel .memlab-status { height: 38px; overflow: hidden; margin-top: 4px; }
.memlab-panel .memlab-note { position: absolute; z-index: 6; top: 48%; left: 50%;
  width: max-content; max-width: 86%; transform: translate(-50%, -50%);
  text-align: center; pointer-events: none; }
.memlab-panel .memlab-note p { margin: 0; padding: 6px 14px; border-radius: 4px;
  border: 1px solid var(--memlab-warn); color: var(--jp-ui-font-color1, #222);
  background: var(--jp-layout-color1, #fff); }

.memlab-panel .memlab-pictures { display: grid; overflow: visible; column-gap: 18px; row-gap: 6px;
  grid-template-columns: repeat(2, minmax(0, 1fr)); }
.memlab-panel .memlab-memory { grid-column: 1 / 3; overflow: visible; position: relative; }
.memlab-panel .memlab-figure { width: 100%; display: flex; align-items: center;
  justify-content: center; }
.memlab-panel .memlab-waiting { border: 1px dashed var(--memlab-line); border-radius: 4px;
  box-sizing: border-box; }
.memlab-panel .memlab-figure p { color: var(--memlab-quiet); margin: 0; padding: 0 12px;
  text-align: center; }
.memlab-panel .memlab-figure svg { width: 100%; height: 100%; display: block; }
.memlab-panel .memlab-stale .memlab-memory .memlab-figure { opacity: 0.5;
  filter: grayscale(0.6); }

.memlab-panel .memlab-table-box { grid-column: 1 / 3; overflow: visible; min-width: 0; }
.memlab-panel .memlab-table-bar { display: flex; align-items: center; gap: 12px;
  overflow: visible; }
.memlab-panel .memlab-heading { color: var(--memlab-quiet); }
.memlab-panel .memlab-table-bar .memlab-name { margin: 2px 0 2px auto; width: auto; }
.memlab-panel .memlab-name .widget-label { width: auto; color: var(--memlab-quiet); }
.memlab-panel .memlab-name input { width: 150px; flex: none; }
.memlab-panel .memlab-table-bar .jupyter-button { width: auto; padding: 0 12px; margin: 2px 0; }
.memlab-panel .memlab-table-body { height: 180px; overflow-y: auto; overflow-x: hidden;
  align-items: flex-start; border-top: 1px solid var(--memlab-line); }
.memlab-panel .memlab-table { flex: 1 1 0; min-width: 0; overflow-x: auto; }
.memlab-panel table.memlab-runs { border-collapse: collapse; width: 100%; margin: 0;
  font-size: 12px; color: inherit; table-layout: auto; }
.memlab-panel table.memlab-runs tr { height: 28px; background: none; }
.memlab-panel table.memlab-runs th { font-weight: 500; color: var(--memlab-quiet); }
.memlab-panel table.memlab-runs th, .memlab-panel table.memlab-runs td { padding: 0 7px;
  text-align: left; white-space: nowrap; vertical-align: middle; border: 0; max-width: none;
  height: 28px; line-height: 16px; border-bottom: 1px solid var(--memlab-line); }
.memlab-panel table.memlab-runs .memlab-number { text-align: right;
  font-variant-numeric: tabular-nums; }
.memlab-panel table.memlab-runs tr.memlab-compared { background: var(--jp-layout-color2, #eee); }
.memlab-panel table.memlab-runs td.memlab-long { max-width: 16ch; overflow: hidden;
  text-overflow: ellipsis; }
.memlab-panel .memlab-row-buttons { flex: 0 0 auto; padding-top: 29px; overflow: visible; }
.memlab-panel .memlab-row-buttons .widget-hbox { height: 29px; gap: 4px; align-items: center;
  padding-left: 6px; overflow: visible; }
.memlab-panel .memlab-row-buttons button { width: auto; height: 22px; line-height: 22px;
  padding: 0 7px; font-size: 11px; margin: 0; }
.memlab-panel .memlab-json { display: none; }

@container (min-width: 1040px) {
  .memlab-panel .memlab-pictures { grid-template-columns: repeat(3, minmax(0, 1fr)); }
  .memlab-panel .memlab-memory { grid-row: 1 / 4; }
  .memlab-panel .memlab-table-box { grid-column: 1 / 4; }
}
@container (max-width: 860px) {
  .memlab-panel .memlab-row { grid-template-columns: 106px minmax(120px, 1fr) 64px 104px;
    min-height: 62px; row-gap: 2px; align-content: center; }
  .memlab-panel .memlab-row .memlab-explanation { grid-column: 2 / 5; grid-row: 2;
    min-height: 37px; }
  .memlab-panel .memlab-status { height: 56px; }
  .memlab-panel table.memlab-runs { font-size: 10px; }
  .memlab-panel table.memlab-runs th, .memlab-panel table.memlab-runs td { padding: 0 2px;
    line-height: 12px; }
  .memlab-panel table.memlab-runs th, .memlab-panel table.memlab-runs .memlab-verdict {
    white-space: normal; }
  .memlab-panel table.memlab-runs td:nth-last-child(-n + 2) { white-space: normal; }
  .memlab-panel table.memlab-runs td.memlab-long { max-width: 9ch; }
  .memlab-panel .memlab-row-buttons .widget-hbox { gap: 2px; padding-left: 3px; }
  .memlab-panel .memlab-row-buttons button { padding: 0 4px; font-size: 10px; }
  .memlab-panel .memlab-row .memlab-remedy { grid-column: 4; }
  .memlab-panel .memlab-choice-row .memlab-explanation { grid-column: 2 / 4; }
  .memlab-panel .memlab-choice-row .widget-toggle-buttons > div { grid-column: 2 / 5; }
}
"""
