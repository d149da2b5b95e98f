/** Arithmetic that must give the numbers of Python and numpy. */

/** Rounds to the nearest, half to even, as numpy does. @param {number} value */
export function rint(value) {
  const rounded = Math.round(value);
  return rounded - value === 0.5 && rounded % 2 !== 0 ? rounded - 1 : rounded;
}

/** The largest of some numbers, and at least 0. @param {Float64Array | Int32Array} values */
export function highest(values) {
  let found = 0;
  for (let at = 0; at < values.length; at += 1) if (values[at] > found) found = values[at];
  return found;
}
