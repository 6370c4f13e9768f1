// What the server drew stands until the components are there; plotly comes with the first figure that is shown.
(function () {
  function drawn(part) {
    return [...part.querySelectorAll("[data-root-id] > *")].some((one) => one.offsetHeight > 20);
  }
  function look() {
    const waiting = [...document.querySelectorAll(".fl-first")];
    waiting.filter((one) => drawn(one.parentElement)).forEach((one) => one.remove());
    if (document.querySelector(".fl-first")) requestAnimationFrame(look);
    else if (address && address.hasAttribute("data-now")) plotly();  // beside the server, which makes the figure now
  }
  document.addEventListener("DOMContentLoaded", look);

  // What components draw as buttons says what it is to who does not see it: pressed or not, more or less.
  const MUTE = ".bk-btn-group, .bk-spin-btn, input[type=file], .noUi-handle";
  function tell(root) {
    root.querySelectorAll(".bk-btn-group .bk-btn:not(:only-child)").forEach((one) =>
      one.setAttribute("aria-pressed", one.classList.contains("bk-active")));
    const view = root.querySelector(".bk-btn-group.bk-vertical .bk-active");
    if (view) {
      document.title = `${view.textContent.trim()} · Firstlight`;
      document.getElementById("fl-view").textContent = view.textContent.trim();  // a heading for who hears the page
    }
    root.querySelectorAll(".bk-spin-btn").forEach((one) => {
      one.setAttribute("aria-label", one.matches(".bk-spin-btn-up") ? "more" : "less");
      one.tabIndex = -1;  // the arrow keys do the same in the field
    });
    root.querySelectorAll(".noUi-handle").forEach((one) => {
      const title = root.querySelector(".bk-slider-title");
      one.setAttribute("aria-label", title ? title.textContent.split(":").slice(0, -1).join(":") : "");
    });
    root.querySelectorAll("input[type=file]").forEach((one) => one.setAttribute("aria-label", "Picture (optional)"));
  }
  const attach = Element.prototype.attachShadow;
  Element.prototype.attachShadow = function (given) {
    const root = attach.call(this, given);
    const watch = new MutationObserver(function () {
      if (root.querySelector(MUTE)) tell(root);
      else if (root.querySelector(":not(style):not(link)")) watch.disconnect();  // it has no buttons
    });
    watch.observe(root, { childList: true, subtree: true, attributes: true, attributeFilter: ["class"] });
    return root;
  };

  const address = document.querySelector("link[data-plotly]");
  let coming = null;
  function plotly() {
    coming = coming || new Promise(function (resolve, reject) {
      const script = document.createElement("script");
      script.src = address.href;
      script.onload = () => resolve(window.Plotly.itself);
      script.onerror = () => { coming = null; reject(new Error("plotly did not load")); };
      document.head.appendChild(script);
    });
    return coming;
  }

  // Calls on one element follow each other, and none outlives it: plotly throws where an element is purged in the midst
  // of a drawing or redrawn without one. An element that is drawn first stands outside the document: that says nothing.
  const last = new WeakMap(), purges = new WeakMap();
  const purged = (element) => purges.get(element) || 0;
  const forever = () => new Promise(() => {});  // whoever waits to go on with a figure that is gone does not
  const REDRAWS = ["react", "relayout", "restyle", "addFrames", "deleteFrames", "resize", "purge"];
  const SETTLED = ["relayout", "restyle", "resize", "purge"];  // without a figure they are done, not undone

  function call(name, element, ...given) {
    if (name === "purge") purges.set(element, purged(element) + 1);
    const then = purged(element);
    const dropped = () => SETTLED.includes(name) ? element : forever();
    const turn = (last.get(element) || Promise.resolve()).then(async function () {
      if (purged(element) !== then || REDRAWS.includes(name) && !element._fullLayout) return null;
      const real = await plotly();
      if (name === "purge") await new Promise((go) => setTimeout(go));  // who waited for the drawing has gone on
      else if (purged(element) !== then) return null;
      const made = await (name === "resize" ? real.Plots : real)[name](element, ...given);
      return purged(element) === then ? { made } : null;
    });
    last.set(element, turn.catch(() => null));
    return turn.then((done) => done ? done.made : dropped());
  }

  if (address) {
    const ordered = (name) => [name, (...given) => call(name, ...given)];
    const resize = ordered("resize")[1];
    const names = ["newPlot", "react", "relayout", "restyle", "addFrames", "deleteFrames", "purge"];
    const standIn = Object.assign(Object.fromEntries(names.map(ordered)), { Plots: { resize } });
    let real = standIn;
    Object.defineProperty(window, "Plotly", {
      get: () => real,
      set(given) { real = { ...given, ...standIn, Plots: { ...given.Plots, resize }, itself: given }; },
    });
  }
})();
