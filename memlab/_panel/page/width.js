/** How much room there is for a picture whose text must stay readable. */

import { useEffect, useRef, useState } from "./vendor/preact.js";

const LEAST = 240;

/**
 * The width of an element in CSS pixels.
 *
 * @param {number} most and what is taken until it is known
 * @returns {[{current: HTMLElement | null}, number]} for the element's `ref`, and the width
 */
export function useWidth(most) {
  const root = useRef(/** @type {HTMLElement | null} */ (null));
  const [width, setWidth] = useState(most);
  useEffect(() => {
    const sizes = new ResizeObserver(([{ contentRect }]) =>
      setWidth(Math.max(Math.min(contentRect.width, most), LEAST)),
    );
    if (root.current) sizes.observe(root.current);
    return () => sizes.disconnect();
  }, []);
  return [root, width];
}
