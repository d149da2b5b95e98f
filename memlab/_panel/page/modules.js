/**
 * Which modules hold the memory of a step, instant by instant.
 *
 * @typedef {import("./estimate.js").Estimate} Estimate
 * @typedef {import("./recorded_step.js").RecordedStep} RecordedStep
 *
 * @typedef {object} ModuleBytes a module with what it and its parts hold at one instant
 * @property {string} path "" is the model itself
 * @property {string} name its last part
 * @property {number} bytes
 * @property {ModuleBytes[]} parts in the order of the model
 *
 * @typedef {{path: string, held: Float64Array}} ModuleGroup paths have "*" for numbers
 */

const LEAST_SHARE = 0.03; // of the peak, for a group of its own

/** The module that holds each recorded block, as an index into `paths`. */
export class BlockModules {
  /** @param {RecordedStep} step */
  static of(step) {
    const modules = known.get(step) ?? new BlockModules(step);
    known.set(step, modules);
    return modules;
  }

  /** @param {RecordedStep} step */
  constructor(step) {
    const { header, arrays, numBlocks } = step;
    /** @type {Map<string, number>} */
    const known = new Map();
    /** @param {string} path */
    const indexOf = (path) => {
      const index = known.get(path) ?? known.size;
      known.set(path, index);
      return index;
    };
    this.of = new Int32Array(numBlocks);
    const root = header.modules[0]; // named by its class
    for (let row = 0; row < arrays.row_block.length; row += 1) {
      const block = arrays.row_block[row];
      if (block < 0) continue;
      const module = header.modules[arrays.row_module[row]] ?? "";
      this.of[block] = indexOf(module === root ? "" : module);
    }
    for (const tensors of [header.parameters, header.states]) {
      for (const [block, path] of Object.entries(tensors)) {
        this.of[Number(block)] = indexOf(path.slice(0, Math.max(path.lastIndexOf("."), 0)));
      }
    }
    this.paths = [...known.keys()];
    this.numBlocks = numBlocks;
  }

  /** Bytes by path at an instant of the timeline, of one category or all. @param {Estimate} found @param {number} instant */
  at(found, instant) {
    const bytes = new Float64Array(this.paths.length);
    if (!found.trace) return bytes;
    const { block, bytes: change } = found.trace;
    for (let event = 0; event <= found.firstEvent + instant; event += 1) {
      bytes[this.of[block[event] % this.numBlocks]] += change[event];
    }
    return bytes;
  }

  /** The modules as a tree, with what each holds at an instant. @param {Estimate} found @param {number} instant */
  tree(found, instant) {
    /** @type {ModuleBytes} */
    const root = { path: "", name: "the model", bytes: 0, parts: [] };
    const nodes = new Map([["", root]]);
    const bytes = this.at(found, instant);
    this.paths.forEach((path, index) => {
      if (!bytes[index]) return;
      let node = root;
      node.bytes += bytes[index];
      if (!path) return;
      const names = path.split(".");
      names.forEach((name, depth) => {
        const here = names.slice(0, depth + 1).join(".");
        const part = nodes.get(here) ?? { path: here, name, bytes: 0, parts: [] };
        if (!nodes.has(here)) node.parts.push(part);
        nodes.set(here, part);
        part.bytes += bytes[index];
        node = part;
      });
    });
    return root;
  }

  /**
   * At most so many groups of modules, by paths with "*" for numbers: layers of one stack are taken
   * together, and what holds most at the peak is divided further.
   *
   * @param {Estimate} found
   * @param {number} most
   * @returns {string[]} the longest paths first
   */
  groupNames(found, most) {
    const peak = found.timeline.total.indexOf(found.peakBytes);
    return divided(this.paths.map(patternOf), this.at(found, Math.max(peak, 0)), most);
  }

  /** What each of some groups holds at an instant. @param {Estimate} found @param {number} instant @param {string[]} names the longest first */
  byGroup(found, instant, names) {
    const sizes = sizesOf(this.paths.map(patternOf), this.at(found, instant), names);
    return names.map((name) => sizes.get(name) ?? 0);
  }

  /**
   * What each of some groups holds over the step.
   *
   * @param {Estimate} found
   * @param {string[]} names the longest first
   * @returns {ModuleGroup[]}
   */
  groups(found, names) {
    const { trace, timeline, firstEvent } = found;
    if (!trace) return [];
    const patterns = this.paths.map(patternOf);
    const groupOf = patterns.map((pattern) => names.findIndex((name) => isWithin(pattern, name)));
    const count = timeline.total.length;
    const held = names.map(() => new Float64Array(count));
    const now = new Float64Array(names.length);
    for (let event = 0; event < firstEvent + count; event += 1) {
      now[groupOf[this.of[trace.block[event] % this.numBlocks]]] += trace.bytes[event];
      const at = event - firstEvent;
      if (at >= 0)
        for (let group = 0; group < held.length; group += 1) held[group][at] = now[group];
    }
    return names.map((path, group) => ({ path, held: held[group] }));
  }
}

/** @type {WeakMap<RecordedStep, BlockModules>} */
const known = new WeakMap();

/** A path with "*" for numbers. @param {string} path */
export const patternOf = (path) => path.replace(/\b\d+\b/g, "*");

/** Whether a module is this one or a part of it. @param {string} path @param {string} whole */
export const isWithin = (path, whole) => !whole || path === whole || path.startsWith(`${whole}.`);

/**
 * Prefixes that together cover all patterns, longer ones first.
 *
 * @param {string[]} patterns
 * @param {Float64Array} bytes of each
 * @param {number} most
 */
function divided(patterns, bytes, most) {
  const least = LEAST_SHARE * bytes.reduce((sum, own) => sum + own, 0);
  let names = [""];
  const settled = new Set();
  for (;;) {
    const sizes = sizesOf(patterns, bytes, names);
    const open = names.filter((name) => !settled.has(name));
    if (!open.length) return names;
    const largest = open.reduce((a, b) => ((sizes.get(b) ?? 0) > (sizes.get(a) ?? 0) ? b : a));
    const inside = patterns.map((path) => path !== largest && owner(path, names) === largest);
    const parts = [
      ...new Set(patterns.filter((_, at) => inside[at]).map((path) => nextPart(path, largest))),
    ];
    const whole = sizesOf(patterns, bytes, [...parts, ...names].sort(longestFirst));
    const large = parts.filter((part) => (whole.get(part) ?? 0) > least);
    if (!large.length || names.length + large.length > most) settled.add(largest);
    else names = [...names, ...large].sort(longestFirst);
  }
}

/** @param {string} one @param {string} other */
const longestFirst = (one, other) => other.length - one.length;

/** The longest of these prefixes. @param {string} path @param {string[]} names longest first */
const owner = (path, names) => names.find((name) => isWithin(path, name)) ?? "";

/** @param {string} path @param {string} whole */
function nextPart(path, whole) {
  const from = whole ? whole.length + 1 : 0;
  const end = path.indexOf(".", from);
  return end < 0 ? path : path.slice(0, end);
}

/** @param {string[]} patterns @param {Float64Array} bytes @param {string[]} names */
function sizesOf(patterns, bytes, names) {
  /** @type {Map<string, number>} */
  const sizes = new Map();
  patterns.forEach((path, index) => {
    const name = owner(path, names);
    sizes.set(name, (sizes.get(name) ?? 0) + bytes[index]);
  });
  return sizes;
}
