/**
 * What a person does to a timeline with pointer, wheel and keys.
 *
 * @typedef {import("./timeline_chart.js").TimelineChart} TimelineChart
 * @typedef {import("./layout.js").Range} Range
 */

import { clamped } from "./layout.js";

const DRAG_PIXELS = 4; // a hand that clicks moves less
const WHEEL = 0.002; // of a doubling for each pixel
/** @type {Range} */
const WHOLE = [0, 1];

/** @param {TimelineChart} chart @param {HTMLElement} root @param {AbortSignal} signal ends it */
export function listen(chart, root, signal) {
  /** @param {string} name @param {(event: any) => void} act */
  const on = (name, act) => root.addEventListener(name, act, { signal, passive: false });
  followPointers(chart, root, on);
  on("dblclick", () => chart.zoomTo(WHOLE));
  on("wheel", (event) => turnWheel(chart, root, event));
  on("keydown", (event) => typeKey(chart, event));
  on("focus", () => chart.redrawOverlay());
  on("blur", () => chart.redrawOverlay());
}

/** @param {TimelineChart} chart @param {HTMLElement} root @param {(name: string, act: (event: any) => void) => void} on */
function followPointers(chart, root, on) {
  /** Pixel of each finger or button that is down. @type {Map<number, number>} */
  const down = new Map();
  /** @type {{x: number, view: Range, place: number, pans: boolean} | null} */
  let drag = null;
  let isMoving = false;
  /** The places of the step that two fingers hold. @type {number[]} */
  let held = [];
  const xOf = (/** @type {PointerEvent} */ event) =>
    event.clientX - root.getBoundingClientRect().left;

  on("pointerdown", (/** @type {PointerEvent} */ event) => {
    if (event.button || down.size === 2 || !chart.at) return;
    const x = xOf(event);
    down.set(event.pointerId, x);
    held = [...down.values()].map((each) => chart.placeOf(each));
    // a finger that moves over the whole step reads it
    const pans = chart.isZoomed && !event.shiftKey;
    drag = down.size > 1 ? null : { x, view: chart.view, place: held[0], pans };
    isMoving = down.size > 1;
  });

  on("pointermove", (/** @type {PointerEvent} */ event) => {
    if (!chart.at) return;
    const x = xOf(event);
    if (down.has(event.pointerId)) down.set(event.pointerId, x);
    if (down.size === 2) return chart.zoomTo(pinched(chart, held, [...down.values()]));
    const isFinger = event.pointerType === "touch";
    if (drag && !isMoving && Math.abs(x - drag.x) >= DRAG_PIXELS) {
      isMoving = true;
      root.setPointerCapture(event.pointerId); // not sooner: it would take the double click
    }
    if (drag && isMoving && drag.pans) {
      const moved =
        ((drag.x - x) / (chart.at.right - chart.at.left)) * (drag.view[1] - drag.view[0]);
      return chart.moveTo(drag.view[0] + moved);
    }
    if (drag && isMoving && !isFinger) chart.mark([drag.place, chart.placeOf(x)]);
    chart.point(chart.instantOf(x));
  });

  const lift = (/** @type {PointerEvent} */ event) => {
    const wasDown = down.delete(event.pointerId);
    const range = chart.range;
    chart.mark(null);
    if (wasDown && event.type === "pointerup") {
      if (range) chart.zoomTo([Math.min(...range), Math.max(...range)]);
      else if (drag && !isMoving) chart.choose(chart.instantOf(xOf(event)));
    }
    drag = null;
    if (event.pointerType === "touch") chart.point(null);
  };
  on("pointerup", lift);
  on("pointercancel", lift);
  on("pointerleave", (event) => down.has(event.pointerId) || chart.point(null));
}

/** The view in which two places lie under two fingers. @param {TimelineChart} chart @param {number[]} places @param {number[]} pixels @returns {Range} */
function pinched(chart, places, pixels) {
  const { left, right } = /** @type {NonNullable<TimelineChart["at"]>} */ (chart.at);
  const apart = pixels[1] - pixels[0];
  if (Math.abs(apart) < DRAG_PIXELS) return chart.view;
  const perPixel = Math.abs((places[1] - places[0]) / apart);
  const from = places[0] - (pixels[0] - left) * perPixel;
  return [from, from + (right - left) * perPixel];
}

/** @param {TimelineChart} chart @param {HTMLElement} root @param {WheelEvent} event */
function turnWheel(chart, root, event) {
  const isOurs = event.ctrlKey || event.metaKey || root.matches(":focus");
  const isSideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
  const changes = chart.isZoomed || (event.deltaY < 0 && !isSideways);
  if (!isOurs || !chart.at || (!changes && !event.ctrlKey)) return; // the page scrolls
  event.preventDefault();
  const pixels =
    (event.deltaX && isSideways ? event.deltaX : event.deltaY) * (event.deltaMode ? 18 : 1);
  const [from, to] = chart.view;
  if (isSideways)
    return chart.moveTo(from + (pixels / (chart.at.right - chart.at.left)) * (to - from));
  const place = chart.placeOf(event.clientX - root.getBoundingClientRect().left);
  // a pinch on a touchpad comes as a wheel with Ctrl and few pixels
  chart.zoomAt(place, 2 ** (-clamped(pixels, -200, 200) * WHEEL * (event.ctrlKey ? 4 : 1)));
}

/** @param {TimelineChart} chart @param {KeyboardEvent} event */
function typeKey(chart, event) {
  const { at } = chart;
  if (!at?.x.length || event.ctrlKey || event.metaKey || event.altKey) return;
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  const column = Math.max(1, Math.round(at.size.density)) * (event.shiftKey ? 10 : 1);
  const page = Math.round(at.columns / 10);
  /** Columns to go. @type {Record<string, number>} */
  const steps = {
    ...{ ArrowLeft: -column, ArrowDown: -column, ArrowRight: column, ArrowUp: column },
    ...{ PageDown: -page, PageUp: page },
  };
  /** @type {Record<string, number>} */
  const instants = { Home: 0, End: at.x.length - 1, p: at.peak };
  /** @type {Record<string, number>} */
  const factors = { "+": 2, "=": 2, "-": 0.5 };
  if (key in steps) chart.step(steps[key]);
  else if (key in instants) chart.choose(instants[key]);
  else if (key in factors) chart.zoomAt(at.x[chart.selected ?? at.peak], factors[key]);
  else if (key === "0") chart.zoomTo(WHOLE);
  else return;
  event.preventDefault();
  event.stopPropagation(); // a notebook has its own keys
}
