(() => {
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
})();
