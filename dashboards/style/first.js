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

  const address = document.querySelector("link[data-plotly]");
  let coming = null;
  function plotly() {
    coming = coming || new Promise(function (resolve, reject) {
      const script = document.createElement("script");
      script.src = address.href;
      script.onload = () => resolve(window.Plotly);
      script.onerror = () => { coming = null; reject(new Error("plotly did not load")); };
      document.head.appendChild(script);
    });
    return coming;
  }
  if (address) {
    window.Plotly = {};
    for (const name of ["newPlot", "react", "relayout", "restyle", "addFrames", "deleteFrames", "purge"])
      window.Plotly[name] = (...given) => plotly().then((real) => real[name](...given));
  }
})();
