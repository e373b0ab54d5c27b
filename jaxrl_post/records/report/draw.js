// Draws every figure of the page in the colours of its CSS, and again in another theme.
const style = getComputedStyle(document.documentElement);
const touch = matchMedia("(pointer: coarse)").matches;

function draw(plot) {
  if (plot.closest("details:not([open])")) return; // Drawn when it is unfolded.
  const written = plot.nextElementSibling.textContent;
  const coloured = written.replace(/var\((--\w+)\)/g, (_, name) =>
    style.getPropertyValue(name).trim());
  const { data, layout } = JSON.parse(coloured);
  layout.dragmode = touch ? false : "zoom"; // A finger scrolls the page.
  Plotly.react(plot, data, layout,
    { displayModeBar: false, doubleClick: "reset", responsive: true });
}

const drawAll = () => document.querySelectorAll(".plot").forEach(draw);
drawAll();
document.querySelectorAll("details").forEach((fold) =>
  fold.addEventListener("toggle", () => fold.querySelectorAll(".plot").forEach(draw)));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
