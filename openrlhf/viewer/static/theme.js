// Before the first paint: the theme that was chosen, if one was. Otherwise the system's holds.
try {
  const theme = localStorage.getItem("openrlhf-theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch { /* a browser that keeps nothing */ }
