// Draws a figure, JSON of data and layout, in the colours of the page's CSS.
const style = getComputedStyle(document.documentElement);
const touch = matchMedia("(pointer: coarse)").matches;

function paint(plot, written) {
  const coloured = written.replace(/var\((--\w+)\)/g, (_, name) =>
    style.getPropertyValue(name).trim());
  const { data, layout } = JSON.parse(coloured);
  layout.dragmode = touch ? false : "zoom"; // A finger scrolls the page.
  return Plotly.react(plot, data, layout,
    { displayModeBar: false, doubleClick: "reset", responsive: true });
}
